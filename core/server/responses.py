"""Bodies of answers and errors, as plain dicts: some are built and encoded for every output of the engine."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from core.errors import RequestRejected, XspecError
from core.server.generation import Delta, Generation
from core.server.protocol import GenerationRequest

DONE = b"data: [DONE]\n\n"
# A comment in the words of server-sent events: clients skip it, proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0  # usual proxies give up after 60 silent seconds, some after 30
_encode = msgspec.json.Encoder().encode

_ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "service_unavailable",
}


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object; `code` is a word or null."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_bytes(body: dict[str, Any]) -> bytes:
    """Encode in ASCII: an error may repeat a client's words, which need not be valid Unicode."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False).encode()


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class Answer(ABC):
    """The shape of one response, whole or in chunks."""

    id_prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, request: GenerationRequest, *, request_id: str) -> None:
        self._request = request
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "created": int(time.time()),
            "model": request.model,
        }

    @abstractmethod
    def whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """Return one choice of a response that is not streamed."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a stream, if this kind of answer has one."""

    @abstractmethod
    def piece(self, index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
        """Return the choice of one chunk: text, or (None) the end."""

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """Read a generation to its end and return the whole response."""
        texts = [""] * len(generation.choices)
        reasons = [""] * len(generation.choices)
        async for delta in generation:
            texts[delta.index] += delta.text
            reasons[delta.index] = str(delta.finish_reason or "")
        choices = [
            self.whole_choice(index, text, reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._head, "object": self.object_whole, "choices": choices, "usage": usage_of(generation)}

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield server-sent events, about one per engine output.

        While nothing happens (a long queue, a long prompt) comments keep the connection from looking dead. An
        error before the first byte is raised, so that the response can have its status; a later one is the
        last event, without [DONE].
        """
        opened: set[int] = set()
        started = False
        try:
            while not generation.is_over:
                delta = await generation.next_within(KEEP_ALIVE_SECONDS)
                if delta is None:
                    started = True
                    yield KEEP_ALIVE
                    continue
                for choice in self._choices_of(delta, opened):
                    started = True
                    yield event(self._chunk(choice, generation))
        except XspecError as error:
            if not started:
                raise
            status = error.status if isinstance(error, RequestRejected) else 500
            yield b"data: " + json_bytes(error_body(str(error), status=status)) + b"\n\n"
            return
        if self._request.include_usage:
            yield event({**self._chunk(None, generation), "usage": usage_of(generation)})
        yield DONE

    def _choices_of(self, delta: Delta, opened: set[int]) -> list[dict[str, Any]]:
        choices = []
        if delta.index not in opened:
            opened.add(delta.index)
            if (opening := self.opening(delta.index)) is not None:
                choices.append(opening)
        # Tokens whose text is held back are worth a chunk only to those who count tokens.
        if delta.text or (self._request.continuous_usage and delta.finish_reason is None):
            choices.append(self.piece(delta.index, delta.text, None))
        if delta.finish_reason is not None:
            choices.append(self.piece(delta.index, None, str(delta.finish_reason)))
        return choices

    def _chunk(self, choice: dict[str, Any] | None, generation: Generation) -> dict[str, Any]:
        choices = [] if choice is None else [choice]
        chunk = {**self._head, "object": self.object_chunk, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = usage_of(generation) if self._request.continuous_usage else None
        return chunk


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._with_delta(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
        return self._with_delta(index, {} if text is None else {"content": text}, finish_reason)

    def _with_delta(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionAnswer(Answer):
    id_prefix = "cmpl"
    object_whole = object_chunk = "text_completion"

    def __init__(self, request: GenerationRequest, *, request_id: str, echoed: Sequence[str] = ()) -> None:
        """`echoed` holds the text of each prompt if answers begin with it."""
        super().__init__(request, request_id=request_id)
        self._echoed = echoed

    def whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        return self.piece(index, self._prompt_of(index) + text, finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return self.piece(index, self._prompt_of(index), None) if self._echoed else None

    def _prompt_of(self, index: int) -> str:
        return self._echoed[index // self._request.num_choices] if self._echoed else ""

    def piece(self, index: int, text: str | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": finish_reason}


def usage_of(generation: Generation) -> dict[str, Any]:
    """Return the tokens that a generation has used so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
