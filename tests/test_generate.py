"""`xspec generate` as a user runs it, on a tiny checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


def generate(model: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    common = ["--model", str(model), "--dtype", "float32", "--enable_graph=false", "--log_level=warning"]
    return subprocess.run(
        [sys.executable, "-m", "xspec_cli", "generate", *common, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_text_on_stdout_and_figures_on_stderr(model: Path) -> None:
    arguments = ["--temperature=0", "--max_tokens=6", "--raw"]
    plain = generate(model, "-p", "the cat sat", *arguments)
    assert plain.returncode == 0, plain.stderr
    assert "6 tokens in" in plain.stderr
    from_stdin = generate(model, "-p", "-", "--json", *arguments, stdin="the cat sat")
    figures = json.loads(from_stdin.stdout)
    assert figures["text"] + "\n" == plain.stdout
    assert (figures["completion_tokens"], figures["finish_reason"]) == (6, "length")


def test_a_bad_value_is_a_usage_error(model: Path) -> None:
    refused = generate(model, "-p", "x", "--temperature=nan")
    assert refused.returncode == ExitCode.USAGE
    assert refused.stderr.startswith("error: temperature")
