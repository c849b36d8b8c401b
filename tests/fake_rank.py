"""A rank without an engine, for launcher tests: `core.rank_main` with a script in place of `run_rank`.

The script is named by the served model's name, so that it travels with the configuration like all else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import zmq

from core import rank_main
from core.config_codec import decode_config
from core.errors import ModelLoadError
from core.server import wire
from core.types import FinishReason, Request, RequestOutput

TOKEN_SECONDS = 0.05
TOKEN_ID = 3 + ord("a")


def run(config_file: Path, to_engine: str, from_engine: str) -> None:
    """Play the script: announce phases, answer requests with one token per step, leave on Shutdown."""
    script = decode_config(config_file.read_bytes()).model.served_name
    context = zmq.Context()
    intake, out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    intake.connect(to_engine)
    out.connect(from_engine)
    out.send(wire.encode(wire.PhaseChanged(phase="load", detail="nothing", done=1, total=1)))
    print("fake rank: loading", file=sys.stderr)
    if script == "raise-in-load":
        raise RuntimeError("marker: the weights have gone")
    if script == "refuse-in-load":
        raise ModelLoadError("config.json has no vocab_size; use a complete directory")
    if script == "segfault-in-load":
        time.sleep(0.2)  # the message above leaves from another thread
        os.kill(os.getpid(), signal.SIGSEGV)
    if script == "hang-in-load":
        time.sleep(600)
    out.send(wire.encode(wire.PhaseChanged(phase="kv")))
    out.send(wire.encode(wire.EngineReady(effective={"device": "fake"})))
    serve(intake, out, deaf=script == "ignore-shutdown")


def serve(intake: zmq.Socket[bytes], out: zmq.Socket[bytes], *, deaf: bool) -> None:
    running: dict[int, tuple[Request, int]] = {}
    while True:
        while intake.poll(0 if running else 20):
            message = wire.decode_to_engine(intake.recv())
            if isinstance(message, wire.AddRequest):
                running[message.request.request_id] = (message.request, 0)
            elif isinstance(message, wire.AbortRequest):
                running.pop(message.request_id, None)
            elif not deaf:
                return
        if running:
            time.sleep(TOKEN_SECONDS)
            out.send(wire.encode(wire.StepOutputs(outputs=step(running))))


def step(running: dict[int, tuple[Request, int]]) -> list[RequestOutput]:
    outputs = []
    for request_id, (request, done) in list(running.items()):
        is_last = done + 1 >= request.params.max_tokens
        reason = FinishReason.LENGTH if is_last else None
        outputs.append(RequestOutput(request_id=request_id, token_ids=[TOKEN_ID], finish_reason=reason))
        if is_last:
            del running[request_id]
        else:
            running[request_id] = (request, done + 1)
    return outputs


if __name__ == "__main__":
    rank_main.exit_process(rank_main.main(sys.argv[1:], run=run))
