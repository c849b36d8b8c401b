"""The table of a launch on a terminal, as it stays on the screen."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from core.launcher import Listening
from core.server.wire import PhaseChanged
from xspec_cli import startup
from xspec_cli.startup import LaunchView


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal in place of stderr."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(startup, "Console", lambda **_: console)
    return stream


def last_lines(screen: io.StringIO, count: int) -> list[str]:
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue().replace("\r", "\n")).splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def load_and_warm_up(view: LaunchView) -> None:
    view.phase_changed(PhaseChanged(phase="kv", detail="32 pages", done=1, total=1))
    view.phase_changed(PhaseChanged(phase="warmup", detail="4 sequences", done=9, total=9))


def test_when_ready_every_phase_is_done(screen: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    view = LaunchView()
    load_and_warm_up(view)
    view.ready(Listening(url="http://host:1", model_name="m"))
    view.close()
    lines = last_lines(screen, 3)
    assert [line[:1] for line in lines] == ["✓", "✓", "✓"]
    assert lines[1].endswith("32 pages")
    assert lines[2].endswith("9/9")  # the last of nine items says nothing any more
    assert capsys.readouterr().out.startswith("xspec is ready: http://host:1/v1 (model m, ")


def test_what_ran_when_a_launch_ended_is_marked(screen: io.StringIO) -> None:
    view = LaunchView()
    load_and_warm_up(view)
    view.close()
    assert [line[:1] for line in last_lines(screen, 3)] == ["✓", "✓", "✗"]
    assert last_lines(screen, 1)[0].endswith("4 sequences")
