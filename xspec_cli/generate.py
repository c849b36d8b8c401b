"""`xspec generate`: one answer on stdout, with the engine in this process and no server.

The request is checked and filled in exactly as the HTTP server does it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from core.errors import EngineFailed, RequestRejected
from xspec_cli.options import LaunchCommand, launch_options, resolve_or_exit
from xspec_cli.sources import DEFAULT, Launch

if TYPE_CHECKING:
    from core.config import EngineConfig
    from core.engine.build import Engine
    from core.server.generation import Choice

DEFAULT_MAX_TOKENS = 256


@click.command("generate", cls=LaunchCommand)
@click.option("-p", "--prompt", required=True, help="What to answer or continue; - reads standard input.")
@click.option("--max_tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True, help="Longest output.")
@click.option("--temperature", type=float, help="0 is greedy. Default: the model's own, else 1.")
@click.option("--top_k", type=int, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top_p", type=float, help="Keep the most likely tokens up to this probability.")
@click.option("--min_p", type=float, help="Keep tokens at least this likely, relative to the likeliest.")
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object with text and figures at the end."
)
@launch_options
def generate(launch: Launch, prompt: str, raw: bool, as_json: bool, **sampling: Any) -> None:
    """Generate once and print, without a server. The text goes to stdout, figures go to stderr."""
    if launch.sources["max_seqs_per_batch"] == DEFAULT:
        # One sequence: larger buckets would only be captured and calibrated, never used.
        launch = dataclasses.replace(
            launch, options=dataclasses.replace(launch.options, max_seqs_per_batch=1)
        )
    config = resolve_or_exit(launch)
    engine = _start_engine(config)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        run = Run(engine, text, raw=raw, sampling=sampling)
        for piece in run.pieces():
            if not as_json:
                click.echo(piece, nl=False)
        if as_json:
            click.echo(json.dumps(run.figures(), ensure_ascii=False))
        else:
            click.echo()
            click.echo(run.summary(), err=True)
    except RequestRejected as error:
        raise click.UsageError(str(error)) from error
    finally:
        engine.close()


def _start_engine(config: EngineConfig) -> Engine:
    from core.ranks import openmp_environment

    os.environ.update(openmp_environment(config.device.num_threads, base=os.environ))

    from core.engine.service import build_engine
    from core.logs import configure_logging, get_logger, log_effective_configuration
    from core.server.wire import PhaseChanged
    from xspec_cli.startup import current_stderr, startup_display

    server = config.server
    configure_logging(format=server.log_format, level=server.log_level, stream=current_stderr())
    display = startup_display()

    def report(phase: str, detail: str, done: int, total: int) -> None:
        display.phase_changed(PhaseChanged(phase=phase, detail=detail, done=done, total=total))

    try:
        engine = build_engine(config, report)
        display.finish()
        if config.speculation and config.speculation.calibration:
            log_effective_configuration(get_logger(), config.speculation.algorithm, engine.effective)
        return engine
    finally:
        display.close()


class Run:
    """One request: its text as it comes, then its figures."""

    def __init__(self, engine: Engine, prompt: str, *, raw: bool, sampling: dict[str, Any]) -> None:
        from core.server.generation import Choice
        from core.server.protocol import (
            CompletionRequest,
            RequestRules,
            check_prompt_tokens,
            parse_request,
            to_sampling_params,
        )
        from core.server.text import TextProcessor
        from core.types import Request

        self.engine = engine
        text = TextProcessor(engine.target_path)
        rules = RequestRules.of(engine.config, vocab_size=text.vocab_size, defaults=text.defaults)
        if raw:
            prompt_ids = text.encode(prompt)
        else:
            chat = text.render_chat([{"role": "user", "content": prompt}])
            prompt_ids = text.encode(chat, add_special_tokens=False)
        check_prompt_tokens(prompt_ids, rules, param="prompt")
        body: dict[str, Any] = {"model": rules.served_name, "prompt": prompt_ids}
        body |= {key: value for key, value in sampling.items() if value not in (None, ())}
        body["max_tokens"] = min(body["max_tokens"], rules.max_model_len - len(prompt_ids))
        request = parse_request(CompletionRequest, json.dumps(body).encode(), rules)
        params = to_sampling_params(request, rules, prompt_tokens=len(prompt_ids))
        self.choice: Choice = Choice(
            request_id=0,
            index=0,
            prompt_tokens=len(prompt_ids),
            detokenizer=text.detokenizer(prompt_ids=prompt_ids),
            stops=request.stop or (),
        )
        self.text = ""
        self._request = Request(request_id=0, prompt_token_ids=tuple(prompt_ids), params=params)

    def pieces(self) -> Iterator[str]:
        """Yield the text piece by piece."""
        choice, began = self.choice, time.monotonic()
        self.engine.add(self._request)
        while choice.finish_reason is None:
            for output in self.engine.step():
                if output.error is not None:
                    raise EngineFailed(output.error)
                delta = choice.take(output)
                now = time.monotonic()
                if choice.first_token_at is None and delta.num_tokens:
                    choice.first_token_at = now
                choice.last_token_at = now
                self.text += delta.text
                yield delta.text
        self.engine.abort(self._request.request_id)  # a stop string ends it here only
        self.first_token_seconds = (choice.first_token_at or began) - began
        self.seconds = time.monotonic() - began

    def figures(self) -> dict[str, Any]:
        """Everything about the run, as plain values."""
        choice = self.choice
        per_token = choice.time_per_output_token
        figures: dict[str, Any] = {
            "text": self.text,
            "finish_reason": str(choice.finish_reason),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.completion_tokens,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "decode_tokens_per_second": 1.0 / per_token if per_token else None,
        }
        spec = choice.spec
        if self.engine.config.speculation is not None and spec.steps:
            figures["speculation"] = {
                "steps": spec.steps,
                "proposed": spec.proposed,
                "verified": spec.verified,
                "accepted": spec.accepted,
                "acceptance_length": 1.0 + spec.accepted / spec.steps,
            }
        return figures

    def summary(self) -> str:
        """The figures in one line for people."""
        figures = self.figures()
        speed = figures["decode_tokens_per_second"]
        parts = [
            f"{figures['completion_tokens']} tokens in {figures['seconds']:.2f} s",
            f"first after {figures['first_token_seconds']:.2f} s",
        ]
        if speed is not None:
            parts.append(f"{speed:.1f} tokens/s")
        if spec := figures.get("speculation"):
            parts.append(
                f"acceptance length {spec['acceptance_length']:.2f} "
                f"({spec['accepted']} of {spec['verified']} verified, {spec['proposed']} proposed)"
            )
        return ", ".join(parts)
