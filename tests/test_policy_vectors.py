"""Every policy vector through `xspec explain --json`; an independent reference wrote the expectations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xspec_cli.explain import explain

VECTORS = Path(__file__).parent / "vectors" / "policy.jsonl"
CASES = [json.loads(line) for line in VECTORS.read_text().splitlines()]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, object]]:
    """All answers of one run: a refused fit must not stop the lines behind it."""
    result = CliRunner().invoke(explain, [str(VECTORS), "--json"])
    assert result.exit_code == 3, result.output  # three fits are refused
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == len(CASES)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case["name"] for case in CASES])
def test_vector(answers: list[dict[str, object]], index: int) -> None:
    expected, answer = CASES[index]["expected"], answers[index]
    if "error" in expected:
        assert list(answer) == ["error"]
        assert expected["error"] in str(answer["error"])
    else:
        assert_same(answer, expected)


def assert_same(actual: object, expected: object, path: str = "$") -> None:
    """Equal structure; numbers to 1e-6 relative."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), path
        assert set(actual) == set(expected), path
        for key in expected:
            assert_same(actual[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), path
        assert len(actual) == len(expected), path
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"{path}[{i}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-12), path
    else:
        assert actual == expected, path
