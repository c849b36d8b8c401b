"""The table of a launch on a terminal, as it stays on the screen."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from core.launcher import Listening
from core.server.wire import PhaseChanged
from xspec_cli import startup
from xspec_cli.startup import LaunchView, current_stderr


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal in place of stderr."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(startup, "Console", lambda **_: console)
    return stream


def lines_on(screen: io.StringIO) -> list[str]:
    """What a terminal shows after all this, with what it means to go up a line and to erase one."""
    lines, row = [""], 0
    for up, erase, end, text in re.findall(
        r"(\x1b\[1A)|(\x1b\[2K)|(\n)|\x1b\[[0-9;?]*[A-Za-z]|([^\x1b\n\r]+)|\r", screen.getvalue()
    ):
        if up:
            row -= 1
        elif erase:
            lines[row] = ""
        elif end:
            row += 1
            lines += [""] * (row == len(lines))
        else:
            lines[row] += text
    return [line.rstrip() for line in lines if line.strip()]


def load_and_warm_up(view: LaunchView) -> None:
    view.phase_changed(PhaseChanged(phase="kv", detail="32 pages", done=1, total=1))
    view.phase_changed(PhaseChanged(phase="warmup", detail="4 sequences", done=9, total=9))


def test_when_ready_every_phase_is_done(screen: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    view = LaunchView()
    load_and_warm_up(view)
    view.ready(Listening(url="http://host:1", model_name="m"))
    view.close()
    lines = lines_on(screen)
    assert [line[:1] for line in lines] == ["✓", "✓", "✓"]
    assert lines[1].endswith("32 pages")
    assert lines[2].endswith("9/9")  # the last of nine items says nothing any more
    assert capsys.readouterr().out.startswith("xspec is ready: http://host:1/v1 (model m, ")


def test_what_ran_when_a_launch_ended_is_marked(screen: io.StringIO) -> None:
    view = LaunchView()
    load_and_warm_up(view)
    view.close()
    assert [line[:1] for line in lines_on(screen)] == ["✓", "✓", "✗"]
    assert lines_on(screen)[-1].endswith("4 sequences")


def test_lines_of_ranks_and_of_the_launcher_do_not_erase_each_other(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        view = LaunchView()
        load_and_warm_up(view)
        relaying = threading.Thread(target=lambda: [view.relay(f"rank {i}") for i in range(100)])
        relaying.start()
        for i in range(100):
            current_stderr().write(f"launcher {i}\n")
        view.close()
        relaying.join()
    finally:
        sys.setswitchinterval(interval)
    lines = lines_on(screen)
    for who in ("rank", "launcher"):
        assert [line for line in lines if line.startswith(who)] == [f"{who} {i}" for i in range(100)]
    assert sum(line.startswith(("✓", "✗")) for line in lines) == 3
