"""Run Prometheus' own checker, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_promtool(*arguments: str | Path, text: bytes = b"") -> None:
    """Fail the test with promtool's words unless it is content; skip where there is no promtool."""
    beside = Path(sys.executable).parent / "promtool"
    program = shutil.which("promtool") or (str(beside) if beside.exists() else None)
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run([program, *map(str, arguments)], input=text, capture_output=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
