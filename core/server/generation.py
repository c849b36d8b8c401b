"""One request's answer while it grows: tokens in, text out, and what it cost.

A Generation has one or more Choices per prompt. The frontend feeds it and a route reads it; neither sockets nor HTTP
appear here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from core.errors import RequestRejected, XspecError
from core.logs import get_logger
from core.server.detokenizer import IncrementalDetokenizer, StopChecker
from core.types import FinishReason, RequestOutput, SpecStats

log = get_logger("xspec.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one engine output added to one choice. `text` is empty while text is held back."""

    index: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None


class Choice:
    """One engine request: its text, its counts and its times (monotonic seconds of this process)."""

    def __init__(
        self,
        *,
        request_id: int,
        index: int,
        sibling: int = 0,
        prompt_tokens: int,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str],
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.sibling = sibling  # number among the choices of one prompt
        self.prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._has_stops = bool(stops)
        self._stops = StopChecker(stops)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.queue_seconds: float | None = None
        self.finish_reason: FinishReason | None = None
        self.spec = SpecStats()

    def take(self, output: RequestOutput) -> Delta:
        """Turn an engine output into text, up to a stop string if one is complete."""
        if output.queue_seconds is not None:
            self.queue_seconds = output.queue_seconds
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens)
        self.spec = output.spec or self.spec
        text, num_tokens, stopped = self._decode(output)
        self.completion_tokens += num_tokens
        self.finish_reason = FinishReason.STOP if stopped else output.finish_reason
        return Delta(index=self.index, text=text, num_tokens=num_tokens, finish_reason=self.finish_reason)

    def _decode(self, output: RequestOutput) -> tuple[str, int, bool]:
        """Return the new text, the tokens it came from, and whether a stop string ended it."""
        tokens = output.token_ids
        # The engine names the token that stopped it; that token is counted and never shown.
        shown = tokens[:-1] if output.stop_token_id is not None else tokens
        pieces: list[str] = []
        # Token by token where text can stop: then tokens, text and usage end at the same place in any block.
        steps = [[token] for token in shown] if self._has_stops else [shown]
        for count, step in enumerate(steps, start=1):
            text, stop = self._stops.push(self._detokenizer.push(step))
            pieces.append(text)
            if stop is not None:
                return "".join(pieces), count, True
        if output.finish_reason is None:
            return "".join(pieces), len(tokens), False
        text, stop = self._stops.push(self._detokenizer.flush())
        pieces += [text] if stop is not None else [text, self._stops.flush()]
        return "".join(pieces), len(tokens), stop is not None

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None below two tokens."""
        if self.first_token_at is None or self.last_token_at is None or self.completion_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.completion_tokens - 1)


class Generation:
    """The choices of one request as an asynchronous iterator of Deltas; use it in a `with` block.

    Leaving the block early (client gone, error) aborts what still runs; leaving it writes the request's line.
    An engine failure is raised from the iterator, after the deltas that came before it.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        facts: dict[str, Any],
        arrived: float,
        clock: Callable[[], float],
        on_close: Callable[[Generation], None],
    ) -> None:
        self.choices = list(choices)
        self.arrived = arrived
        self.error: XspecError | None = None
        self._facts = facts
        self._clock = clock
        self._on_close = on_close
        self._queue: asyncio.Queue[Delta | XspecError] = asyncio.Queue()
        self._open_choices = len(self.choices)  # choices whose last delta the reader has not had
        self._closed = False

    def put(self, item: Delta | XspecError) -> None:
        """Hand an item to the reader; an error is the last one that it gets."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        return self._received(await self._queue.get())

    async def next_within(self, seconds: float) -> Delta | None:
        """Return the next delta, or None when none comes in this time. Only while not `is_over`."""
        if not self._queue.empty():
            return self._received(self._queue.get_nowait())
        try:
            async with asyncio.timeout(seconds):
                item = await self._queue.get()
        except TimeoutError:
            return None
        return self._received(item)

    @property
    def is_over(self) -> bool:
        """Whether the reader has had every choice's last delta, or an error."""
        return self._open_choices == 0

    def _received(self, item: Delta | XspecError) -> Delta:
        if isinstance(item, XspecError):
            self._open_choices = 0
            self.error = item
            raise item
        if item.finish_reason is not None:
            self._open_choices -= 1
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not finished and log the request; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        log.info("request.finished", **self._facts, **self._summary())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; one with several choices counts once."""
        return sum(choice.prompt_tokens for choice in self.choices if choice.sibling == 0)

    @property
    def cached_tokens(self) -> int:
        """Of those tokens the ones that the prefix cache held for the first choice."""
        return sum(choice.cached_tokens for choice in self.choices if choice.sibling == 0)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    def _summary(self) -> dict[str, Any]:
        """Return the figures of the log line. Never text: prompts and answers are the client's."""
        firsts = [choice.first_token_at for choice in self.choices if choice.first_token_at is not None]
        queued = [choice.queue_seconds for choice in self.choices if choice.queue_seconds is not None]
        paces = [pace for choice in self.choices if (pace := choice.time_per_output_token) is not None]
        reasons = {str(choice.finish_reason) for choice in self.choices}
        status = 499 if "abort" in reasons else 200
        if self.error is not None:
            status = self.error.status if isinstance(self.error, RequestRejected) else 500
        return {
            "choices": len(self.choices),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "queue_seconds": _rounded(max(queued, default=None)),
            "ttft_seconds": _rounded(min(firsts) - self.arrived if firsts else None),
            "tpot_seconds": _rounded(sum(paces) / len(paces) if paces else None),
            "e2e_seconds": _rounded(self._clock() - self.arrived),
            "finish_reason": ",".join(sorted(reasons)),
            "status": status,
            **self._speculation(),
        }

    def _speculation(self) -> dict[str, Any]:
        steps = sum(choice.spec.steps for choice in self.choices)
        accepted = sum(choice.spec.accepted for choice in self.choices)
        return {
            "spec_steps": steps,
            "spec_proposed": sum(choice.spec.proposed for choice in self.choices),
            "spec_verified": sum(choice.spec.verified for choice in self.choices),
            "spec_accepted": accepted,
            # The bonus token counts, as everywhere: 1 means that speculation gained nothing.
            "acceptance_length": round(1 + accepted / steps, 3) if steps else None,
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
