"""The routes. Each one checks, submits, and leaves the tokens to others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, ParamSpec, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from core.config import EngineConfig
from core.errors import RequestRejected, XspecError
from core.server.auth import GENERATING_ROUTES, RequireApiKey
from core.server.frontend import Frontend, Unavailable
from core.server.generation import Generation
from core.server.http import (
    CLIENT_GONE,
    ClientGone,
    Edge,
    EventStream,
    bind_socket,
    route_template,
    serve_http,
    until_disconnect,
)
from core.server.info import server_info
from core.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    RequestRules,
    StrictModel,
    check_prompt_tokens,
    check_vocabulary,
    model_not_found,
    parse_request,
    to_sampling_params,
)
from core.server.responses import Answer, ChatAnswer, CompletionAnswer, error_body, json_bytes
from core.server.text import TextProcessor
from core.server.tokenization import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from metrics.prometheus import ServerMetrics

__all__ = ["bind_socket", "create_app", "serve_http"]

# Parsing or tokenizing this much takes about a millisecond; more leaves the event loop to the streams.
INLINE_LENGTH = 4096
DOCUMENTED_REQUESTS: tuple[type[StrictModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_REJECT_REASONS = {
    "queue_full": "queue_full",
    "draining": "draining",
    "context_length_exceeded": "too_long",
    "model_not_found": "not_found",
}

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """What the routes share."""

    def __init__(
        self, frontend: Frontend, text: TextProcessor, config: EngineConfig, metrics: ServerMetrics
    ) -> None:
        self.frontend = frontend
        self.text = text
        self.config = config
        self.metrics = metrics
        self.rules = RequestRules.of(config, vocab_size=text.vocab_size, defaults=text.defaults)
        self.created = int(time.time())

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.rules.served_name,
            "object": "model",
            "created": self.created,
            "owned_by": "xspec",
            "max_model_len": self.rules.max_model_len,
        }

    async def chat(self, http: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        arrived = self.frontend.clock()
        self.frontend.check_available()
        body = await http.body()
        request = await _apart(len(body), parse_request, ChatCompletionRequest, body, self.rules)
        prompt_ids = await _apart(len(body), self._chat_tokens, request)
        answer = ChatAnswer(request, request_id=http.state.request_id)
        generation = self._submit(http, request, [prompt_ids], param="messages", arrived=arrived)
        return await self._respond(http, request, answer, generation)

    async def complete(self, http: Request) -> Response:
        """Answer POST /v1/completions."""
        arrived = self.frontend.clock()
        self.frontend.check_available()
        body = await http.body()
        request = await _apart(len(body), parse_request, CompletionRequest, body, self.rules)
        self.frontend.check_fits(len(request.prompt), num_choices=request.num_choices)
        prompts = await _apart(len(body), self._prompt_tokens, request)
        echoed = await _apart(len(body), self._echoed, request) if request.echo else ()
        answer = CompletionAnswer(request, request_id=http.state.request_id, echoed=echoed)
        generation = self._submit(http, request, prompts, param="prompt", arrived=arrived)
        return await self._respond(http, request, answer, generation)

    def _chat_tokens(self, request: ChatCompletionRequest) -> list[int]:
        prompt = self.text.render_chat(
            [message.for_template() for message in request.messages],
            add_generation_prompt=request.add_generation_prompt is not False,
            template_kwargs=request.chat_template_kwargs,
        )
        # The template has already written the special tokens.
        return self._encode(prompt, add_special_tokens=False, param="messages")

    def _prompt_tokens(self, request: CompletionRequest) -> list[list[int]]:
        return [
            self._encode(prompt, add_special_tokens=True, param="prompt")
            if isinstance(prompt, str)
            else prompt
            for prompt in request.prompt
        ]

    def _echoed(self, request: CompletionRequest) -> list[str]:
        """The prompts as text: as they came, or what their tokens stand for."""
        skip_special_tokens = request.skip_special_tokens is not False
        texts = []
        for prompt in request.prompt:
            if not isinstance(prompt, str):
                check_vocabulary(prompt, self.rules, param="prompt")
                prompt = self.text.decode(prompt, skip_special_tokens=skip_special_tokens)
            texts.append(prompt)
        return texts

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            return self.text.encode(text, add_special_tokens=add_special_tokens)
        except RequestRejected as error:
            raise RequestRejected(f"{param}: {error}", param=param) from None

    def _submit(
        self,
        http: Request,
        request: GenerationRequest,
        prompts: list[list[int]],
        *,
        param: str,
        arrived: float,
    ) -> Generation:
        params = []
        for prompt_ids in prompts:
            check_prompt_tokens(prompt_ids, self.rules, param=param)
            params += [
                to_sampling_params(request, self.rules, prompt_tokens=len(prompt_ids), sibling=sibling)
                for sibling in range(request.num_choices)
            ]
        generation = self.frontend.submit(
            prompts,
            params,
            num_choices=request.num_choices,
            text=self.text,
            stops=request.stop or (),
            skip_special_tokens=request.skip_special_tokens is not False,
            endpoint=route_template(http.scope),
            client_request_id=http.state.request_id,
            arrived=arrived,
        )
        http.state.submitted = True  # from here on it is counted as a request, not as a refusal
        return generation

    async def tokens(self, http: Request, answer: Callable[..., dict[str, Any]]) -> Response:
        """Answer POST /tokenize or /detokenize; neither needs the engine."""
        body = await http.body()
        return _json(await _apart(len(body), answer, body, self.text, self.rules))

    async def _respond(
        self, http: Request, request: GenerationRequest, answer: Answer, generation: Generation
    ) -> Response:
        if request.stream:
            return EventStream(generation, answer.stream(generation))
        with generation:
            return _json(await until_disconnect(http.receive, answer.collect(generation)))

    def status(self) -> dict[str, str]:
        frontend = self.frontend
        detail = frontend.silence or frontend.detail
        return {"state": str(frontend.state), "phase": frontend.phase, "detail": detail}

    def refuse(self, http: Request, error: XspecError) -> Response:
        """Turn an error that reached the edge into an answer."""
        if not isinstance(error, RequestRejected):
            return _error(error_body(str(error), status=500), 500, {})
        if route_template(http.scope) in GENERATING_ROUTES and not hasattr(http.state, "submitted"):
            reason = _REJECT_REASONS.get(error.code or "", "invalid" if error.status < 500 else "other")
            self.metrics.request_rejected(reason)
        headers = {}
        if isinstance(error, Unavailable):
            retry = error.retry_after
            headers = {"x-should-retry": "false"} if retry is None else {"retry-after": str(retry)}
        body = error_body(str(error), status=error.status, param=error.param, code=error.code)
        return _error(body, error.status, headers)


async def _apart(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work over `size` bytes: at once where that is short, else on a thread."""
    if size <= INLINE_LENGTH:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def create_app(
    frontend: Frontend, text: TextProcessor, config: EngineConfig, metrics: ServerMetrics
) -> FastAPI:
    """Return the ASGI application. The caller starts and stops the frontend."""
    service = Service(frontend, text, config, metrics)
    app = FastAPI(title="xspec", version=version("xspec"), redirect_slashes=False, redoc_url=None)
    if config.server.api_key_digests:
        app.add_middleware(RequireApiKey, digests=config.server.api_key_digests, metrics=metrics)
    app.add_middleware(Edge, metrics=metrics)  # added last, so it is outermost
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_model_routes(app, service)
    _add_status_routes(app, service)
    _add_error_handlers(app, service)
    _document_requests(app)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    # Bodies are read by the route itself: NaN, sizes and error bodies are not FastAPI's to decide.
    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await service.chat(request)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await service.complete(request)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest, TokenizeChatRequest))
    async def post_tokenize(request: Request) -> Response:
        """The token ids of a text or of a conversation."""
        return await service.tokens(request, tokenize)

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def post_detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await service.tokens(request, detokenize)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [service.model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model != service.rules.served_name:
            raise model_not_found(model, service.rules)
        return _json(service.model_card())


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Liveness: 200 while the engine may answer, also while it starts."""
        return _json(service.status(), 200 if service.frontend.is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Readiness: 200 when requests are served."""
        return _json(service.status(), 200 if service.frontend.is_ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        content_type, body = service.metrics.render(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    @app.get("/version")
    async def get_version() -> Response:
        return _json({"version": version("xspec")})

    @app.get("/server_info")
    async def get_server_info() -> Response:
        """Effective configuration, captured geometry, calibration and acceptance so far."""
        return _json(server_info(service.frontend, service.config, service.metrics))


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, XspecError)
        return service.refuse(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _error(
            error_body(message, status=error.status_code), error.status_code, dict(error.headers or {})
        )

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(XspecError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_disconnect)
    app.add_exception_handler(ClientDisconnect, on_disconnect)


def _body_schema(*kinds: type[StrictModel]) -> dict[str, Any]:
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document_requests(app: FastAPI) -> None:
    """Add the request schemas to the OpenAPI document, since no route declares them to FastAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema(
                [(kind, "validation") for kind in DOCUMENTED_REQUESTS],
                ref_template="#/components/schemas/{model}",
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json_bytes(body), status, media_type="application/json")


def _error(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(json_bytes(body), status, headers=headers, media_type="application/json")
