"""An engine that needs no model: it speaks the wire protocol over real sockets and answers from a script.

Also a tiny byte-level model directory (tokenizer, template, defaults), so that server tests import no torch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.server import wire
from core.types import FinishReason, Request, RequestOutput, SpecStats
from metrics.stats import StepStats

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte (ids 3 to 258) behind three special ones, so tokens end anywhere in a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: index for index, name in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_text_model(directory: Path) -> Path:
    """Write what the server reads of a model directory (no weights)."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config.json": {"vocab_size": 320, "eos_token_id": 0},
        "generation_config.json": {
            "eos_token_id": [EOS_TOKEN_ID, 0],
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
        },
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>",
            "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"},
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


@dataclass
class FakeEngine:
    """Rank 0 as a thread. `script(request)` yields the token ids of each step; it stops at max_tokens.

    `paused` holds all steps back, so that a test decides how far a request may run.
    """

    to_engine: str
    from_engine: str
    script: Callable[[Request], Iterable[Sequence[int]]]
    step_seconds: float = 0.0
    announce_ready: bool = True
    added: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    steps_of: dict[int, int] = field(default_factory=dict)
    fail_after_steps: int | None = None
    refuse: str | None = None
    effective: dict[str, Any] = field(default_factory=lambda: {"device": "fake"})

    def __post_init__(self) -> None:
        self._running: dict[int, tuple[Request, list[Sequence[int]], int]] = {}
        self._step = 0
        self._stop = threading.Event()
        self.paused = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> FakeEngine:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        context = zmq.Context()
        intake, out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (intake, out):
            socket.setsockopt(zmq.LINGER, 0)
        intake.connect(self.to_engine)
        out.connect(self.from_engine)
        out.send(wire.encode(wire.PhaseChanged(phase="load", detail="weights", done=1, total=2)))
        if self.announce_ready:
            out.send(wire.encode(wire.EngineReady(effective=self.effective)))
        while not self._stop.is_set():
            self._take(intake)
            if self._running and not self.paused.is_set():
                self._one_step(out)
        context.destroy(linger=0)

    def _take(self, intake: zmq.Socket) -> None:
        while intake.poll(0 if self._running and not self.paused.is_set() else 5):
            message = wire.decode_to_engine(intake.recv())
            if isinstance(message, wire.AddRequest):
                request = message.request
                self.added.append(request)
                self._running[request.request_id] = (request, list(self.script(request)), 0)
            elif isinstance(message, wire.AbortRequest):
                self.aborted.append(message.request_id)
                self._running.pop(message.request_id, None)

    def _one_step(self, out: zmq.Socket) -> None:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._step += 1
        if self.fail_after_steps is not None and self._step > self.fail_after_steps:
            failure = wire.EngineFailure(
                phase="serve", error_type="RuntimeError", message="scripted", exit_code=8
            )
            out.send(wire.encode(failure))
            self._stop.set()
            return
        outputs = [self._advance(request_id) for request_id in list(self._running)]
        stats = StepStats(
            step=self._step, num_sequences=len(outputs), prefill_tokens=0, running=len(self._running)
        )
        out.send(wire.encode(wire.StepOutputs(outputs=outputs, stats=stats)))

    def _advance(self, request_id: int) -> RequestOutput:
        request, steps, done = self._running[request_id]
        if self.refuse is not None:
            del self._running[request_id]
            return RequestOutput(
                request_id=request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=self.refuse
            )
        self.steps_of[request_id] = self.steps_of.get(request_id, 0) + 1
        tokens = list(steps.pop(0)) if steps else [EOS_TOKEN_ID]
        stop_id, reason = None, None
        stops = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (EOS_TOKEN_ID, 0))}
        for index, token in enumerate(tokens[: request.params.max_tokens - done]):
            if token in stops:
                tokens, stop_id, reason = tokens[: index + 1], token, FinishReason.STOP
                break
        if reason is None and done + len(tokens) >= request.params.max_tokens:
            tokens, reason = tokens[: request.params.max_tokens - done], FinishReason.LENGTH
        output = RequestOutput(
            request_id=request_id, token_ids=tokens, finish_reason=reason, stop_token_id=stop_id
        )
        # Cumulative on every output, so that the figures are there when the parent ends a request.
        output.spec = SpecStats(steps=self.steps_of[request_id], proposed=14, verified=7, accepted=3)
        output.queue_seconds = 0.25 if done == 0 else None
        if reason is not None:
            del self._running[request_id]
        else:
            self._running[request_id] = (request, steps, done + len(tokens))
        return output
