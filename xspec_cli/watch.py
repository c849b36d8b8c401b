"""What `xspec status` and `xspec top` share: their options, and how reports reach a screen, a pipe or a script."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from metrics.console import line, render
from metrics.report import Report
from xspec_cli.monitor import DEFAULT_URL, Monitor, Probe, parse_url

DEFAULT_INTERVAL = 2.0
WINDOW_SECONDS = 10.0
PIPE_WIDTH = 132


class _ServerUrl(click.ParamType[str]):
    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_url(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


url_argument = click.argument("url", metavar="[URL]", type=_ServerUrl(), default=DEFAULT_URL)


def watch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --interval and --count."""
    interval = click.option(
        "--interval",
        type=click.FloatRange(min=0.1, max=3600),
        metavar="SECONDS",
        help=f"Seconds between two looks at the server. [default: {DEFAULT_INTERVAL:g}]",
    )
    count = click.option(
        "--count", type=click.IntRange(min=1), metavar="N", help="End after this many looks."
    )
    return interval(count(function))


def reports(url: str, *, interval: float | None, count: int | None) -> Iterator[Report]:
    """Look at a server every `interval` seconds; without a count for ever."""
    every = DEFAULT_INTERVAL if interval is None else interval
    probe = Probe(url, timeout_seconds=max(2.0, every))
    monitor = Monitor(probe.read, window_seconds=WINDOW_SECONDS)
    due = time.monotonic()
    looks = 0
    while True:
        yield monitor.look()
        looks += 1
        if looks == count:
            return
        # After a slow look the next one waits as well: a server in trouble is not asked without pause.
        due = max(due + every, time.monotonic() + every / 2)
        time.sleep(max(0.0, due - time.monotonic()))


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM are how one leaves: the block ends, its cleanup runs, and the command goes on."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def can_redraw() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


def report_console() -> Console:
    """Stdout: as wide as the terminal; a pipe gets rows that are rarely broken."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(width=width, markup=False, highlight=False)


def draw_screens(found: Iterator[Report], *, alternate_screen: bool) -> None:
    """Redraw one screen; on the terminal's alternate screen what was there comes back at the end."""
    console = report_console()
    asking = Text("asking the server ...", style="dim")
    with Live(asking, console=console, screen=alternate_screen, auto_refresh=False) as live:
        live.refresh()
        for report in found:
            live.update(render(report, max_height=console.size.height - 1), refresh=True)


def print_lines(found: Iterator[Report]) -> None:
    """Print one line of key=value per report."""
    for report in found:
        click.echo(line(report))


def print_json(found: Iterator[Report]) -> None:
    """Print one JSON object per line."""
    for report in found:
        click.echo(to_json(report))


def to_json(report: Report) -> str:
    """The report as JSON; what is no number, or infinite, is null."""
    return json.dumps(_plain(asdict(report)), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
