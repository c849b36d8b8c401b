"""Requests of the OpenAI API: what is accepted, what is refused, and what it means to the engine.

Refusing is the rule: a field that would change the answer and is not served is named in a 400, never ignored.
Every refusal is a RequestRejected; nothing here knows HTTP, sockets or the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from core.config import EngineConfig
from core.errors import RequestRejected
from core.server.text import GenerationDefaults
from core.server.unserved import refuse_under_adaptive, short_repr, strip_neutral
from core.types import SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters; stop strings are compared with every piece of text
MAX_INT = 2**63 - 1
MAX_CHOICES = 128  # of one prompt, as in the OpenAI API

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """What requests are checked against: the model's limits and the modes of this launch."""

    served_name: str
    max_model_len: int
    vocab_size: int
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    adaptive_target_verify: bool = False
    greedy_only: bool = False  # the unified graph decodes greedily

    @classmethod
    def of(cls, config: EngineConfig, *, vocab_size: int, defaults: GenerationDefaults) -> RequestRules:
        """Return the rules of a launch."""
        speculation = config.speculation
        return cls(
            served_name=config.model.served_name,
            max_model_len=config.model.max_model_len,
            vocab_size=vocab_size,
            defaults=defaults,
            adaptive_target_verify=speculation is not None and speculation.adaptive_target_verify,
            greedy_only=speculation is not None and speculation.unified_graph,
        )


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be read as placeholders of the message's template.
    return PydanticCustomError("value_error", message.replace("{", "(").replace("}", ")"))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _wrong(f"may hold at most {MAX_STOPS} strings, not {len(stops)}")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise _wrong(f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _check_prompt(value: Any) -> list[Prompt]:
    """Turn the four shapes of a completions prompt into a list of strings or token-id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise _wrong("must not be empty")
    if all(_is_int(item) for item in value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) and all(_is_int(token) for token in item) for item in value):
        return list(value)
    raise _wrong("must hold either strings, or token ids, or lists of token ids")


def _check_content(value: Any) -> str:
    """Turn a message's content into text: a string, or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong("each part must be an object with a type")
        if part["type"] != "text":
            raise _wrong(f"parts of type {short_repr(part['type'])} are not available; only text is")
        if not isinstance(part.get("text"), str):
            raise _wrong("a text part must have a text string")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_empty(value: Any) -> None:
    if value not in (None, []):
        raise _wrong("is not available yet; leave it out")


Stop = Annotated[
    list[str],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
PromptField = Annotated[
    list[Prompt],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
Unavailable = Annotated[None, PlainValidator(_check_empty), WithJsonSchema({"type": "null"})]


class StrictModel(BaseModel):
    """A body or a part of one: types are not converted, unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatMessage(StrictModel):
    """One message. What an earlier answer carries besides text is accepted only empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Unavailable = None
    annotations: Unavailable = None
    audio: Unavailable = None
    function_call: Unavailable = None
    tool_calls: Unavailable = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates expect it. They know "system", which "developer" replaced."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class GenerationRequest(StrictModel):
    """Fields that chat and plain completions share. None means: not given."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    stop: Stop | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = Field(None, ge=-MAX_INT - 1, le=MAX_INT)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted and without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The name and value of the field that limits the answer's tokens."""
        return "max_tokens", self.max_tokens

    @property
    def num_choices(self) -> int:
        """Answers wanted to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    prompt: PromptField
    echo: bool | None = None


class ChatCompletionRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None  # a conversation is not a text that an answer could begin with
    parallel_tool_calls: bool | None = None  # says how tools are called; without tools it says nothing

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


M = TypeVar("M", bound=StrictModel)
R = TypeVar("R", bound=GenerationRequest)


def parse_request(kind: type[R], body: bytes, rules: RequestRules) -> R:
    """Read and check a request body; what remains to be checked needs the prompt's tokens."""
    raw = parse_json_object(body)
    check_model(raw, rules)
    raw = strip_neutral(raw, adaptive_target_verify=rules.adaptive_target_verify)
    request = validated(kind, raw)
    _check_combinations(request, rules)
    return request


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse JSON. NaN and Infinity pass here, so that validation can name the field that holds them."""
    try:
        value = json.loads(body)
    except RecursionError:
        raise RequestRejected("the body is nested too deeply") from None
    except ValueError as error:
        # Not the error's own text where it may hold the document: prompts do not belong in messages.
        where = (
            f" at line {error.lineno}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        raise RequestRejected(f"the body is not valid JSON{where}") from None
    if not isinstance(value, dict):
        raise RequestRejected(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def validated(kind: type[M], raw: dict[str, Any]) -> M:
    """Check a body's fields; the first fault is the refusal."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False)) from None


def check_model(raw: dict[str, Any], rules: RequestRules) -> None:
    """Refuse a body that names no model or another one."""
    name = raw.get("model")
    if not isinstance(name, str):
        raise RequestRejected("model: a model name is required", param="model")
    if name != rules.served_name:
        raise model_not_found(name, rules)


def model_not_found(name: str, rules: RequestRules) -> RequestRejected:
    """Return the 404 for a model that this server does not have."""
    return RequestRejected(
        f"the model {short_repr(name)} does not exist; this server has {rules.served_name!r}",
        param="model",
        status=404,
        code="model_not_found",
    )


def _first_problem(problems: Sequence[ErrorDetails]) -> RequestRejected:
    problem = problems[0]
    param = ""
    for part in problem["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if problem["type"] == "extra_forbidden":
        return RequestRejected(f"{short_repr(param)} is not a field that this server knows", param=param)
    if problem["type"] == "missing":
        return RequestRejected(f"{param}: the field is required", param=param)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    # Numbers are worth repeating; text may be a prompt.
    value = problem["input"]
    got = f" (got {short_repr(value)})" if isinstance(value, int | float) else ""
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    return RequestRejected(f"{param}: {message}{got}{more}", param=param)


def _check_combinations(request: GenerationRequest, rules: RequestRules) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestRejected("stream_options: only allowed when stream is true", param="stream_options")
    if request.seed is not None and rules.adaptive_target_verify:
        raise refuse_under_adaptive("seed", "a seed is")
    if rules.greedy_only and _temperature(request, rules) > 0:
        raise RequestRejected(
            "temperature: the unified graph decodes greedily; send temperature 0",
            param="temperature",
            code="unsupported_parameter",
        )
    check_vocabulary(request.stop_token_ids or (), rules, param="stop_token_ids")
    if isinstance(request, ChatCompletionRequest):
        both = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(both) > 1:
            raise RequestRejected(
                "max_completion_tokens: differs from max_tokens; send one of them",
                param="max_completion_tokens",
            )


def check_vocabulary(ids: Sequence[int], rules: RequestRules, *, param: str) -> None:
    """Refuse token ids that the model does not have."""
    for token in ids:
        if not 0 <= token < rules.vocab_size:
            raise RequestRejected(
                f"{param}: token id {short_repr(token)} is outside the vocabulary of {rules.vocab_size}",
                param=param,
            )


def check_prompt_tokens(prompt_ids: Sequence[int], rules: RequestRules, *, param: str) -> None:
    """Refuse prompts that are empty, hold unknown tokens or leave no room for an answer."""
    if not prompt_ids:
        raise RequestRejected(f"{param}: the prompt has no tokens", param=param)
    if len(prompt_ids) + 1 > rules.max_model_len:
        raise RequestRejected(
            f"{param}: the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer in the "
            f"context of {rules.max_model_len} tokens; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    check_vocabulary(prompt_ids, rules, param=param)


def to_sampling_params(
    request: GenerationRequest, rules: RequestRules, *, prompt_tokens: int, sibling: int = 0
) -> SamplingParams:
    """Return what the engine needs, with every default filled in.

    `sibling` numbers the choices of one prompt. A seed gives each its own draws; the first one's are those of
    the same request with n = 1.
    """
    room = rules.max_model_len - prompt_tokens
    name, limit = request.token_limit
    if limit is not None and limit > room:
        raise RequestRejected(
            f"{name}: {limit} is too large; the context has {rules.max_model_len} tokens and the prompt "
            f"{prompt_tokens}, so at most {room} can be generated",
            param=name,
            code="context_length_exceeded",
        )
    defaults = rules.defaults
    top_k = defaults.top_k if request.top_k is None else max(0, request.top_k)
    return SamplingParams(
        temperature=_temperature(request, rules),
        top_k=min(top_k, rules.vocab_size),
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        max_tokens=room if limit is None else limit,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        seed=None if request.seed is None else _wrapped(request.seed + sibling),
    )


def _wrapped(seed: int) -> int:
    """A seed as a signed 64-bit number."""
    return (seed + MAX_INT + 1) % 2**64 - MAX_INT - 1


def _temperature(request: GenerationRequest, rules: RequestRules) -> float:
    return rules.defaults.temperature if request.temperature is None else request.temperature
