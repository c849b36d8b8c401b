"""`xspec explain` and `xspec calibrate fit` as a user meets them: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.spec.cost_table import write_bundle
from core.spec.costs import CostSample, fit_costs
from tests.test_cost_table import make_bundle
from xspec_cli.calibrate import calibrate
from xspec_cli.explain import explain

BUDGET: dict[str, Any] = {
    "kind": "verify_budget",
    "input": {
        "draft_width": 7,
        "request_bucket": 2,
        "tiers": [2, 4, 8, 16],
        "table": {
            "draft_width": 7,
            "model": "sps",
            "steps_per_second": {"2": 100, "4": 90, "8": 80, "16": 20},
        },
        "requests": [{"confidence": [0.9] * 7}, {"confidence": None, "draft_limit": 2}],
    },
}
DEPTH: dict[str, Any] = {
    "kind": "draft_depth",
    "input": {"sequences": 1, "request_bucket": 1, "prefix_acceptance": [0.5], "cost_ms": [10, 12]},
}
WINDOWS: dict[str, Any] = {
    "kind": "prefix_acceptance",
    "input": {"max_depth": 2, "window_size": 5, "batches": [{"depth": 1, "accepted": [1, 0]}]},
}
ALLOCATION: dict[str, Any] = {
    "kind": "prefix_allocation",
    "input": {"draft_width": 2, "target_rows": 3, "confidence": [[0.5, 0.9], [0.9, None]]},
}
FIT: dict[str, Any] = {
    "kind": "cost_fit",
    "input": {
        "model": "additive",
        "draft_width": 7,
        "samples": [
            {"request_bucket": b, "target_rows": g, "seconds": [0.01]} for b in (1, 16) for g in (b, 2 * b)
        ],
    },
}


def run(cases: list[Any] | str, *options: str) -> Result:
    text = cases if isinstance(cases, str) else "\n".join(json.dumps(case) for case in cases)
    return CliRunner().invoke(explain, ["-", *options], input=text)


def edited(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**case, "input": {**case["input"], **changes}}


def test_json_answers_one_line_per_case() -> None:
    result = run([BUDGET, DEPTH, WINDOWS, ALLOCATION], "--json")
    assert result.exit_code == 0, result.output
    budget, depth, windows, allocation = map(json.loads, result.stdout.splitlines())
    assert budget["target_rows"] == 8
    assert budget["candidates"][1]["expected_tokens"] == pytest.approx(4.0)
    assert depth["depth"] == 1
    assert windows == {"prefix_acceptance": [0.5, 0.25]}
    assert allocation == {"verify_lengths": [0, 1]}


def test_a_case_may_span_lines_and_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(DEPTH, indent=2))
    result = CliRunner().invoke(explain, [str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["depth"] == 1


def test_tables_say_why_the_winner_won() -> None:
    result = run([BUDGET, DEPTH, WINDOWS, ALLOCATION])
    assert result.exit_code == 0, result.output
    for words in (
        "expected tokens",
        "8 rows win",
        "chosen",
        "depth 1 has the highest",
        "extrapolated",
        "1 draft rows",
    ):
        assert words in result.stdout


def test_a_refused_fit_is_an_answer_and_later_lines_still_run() -> None:
    result = run([FIT, DEPTH], "--json")
    assert result.exit_code == 3
    refused, depth = map(json.loads, result.stdout.splitlines())
    assert list(refused) == ["error"]
    assert "connected" in refused["error"]
    assert depth["depth"] == 1
    assert result.stderr == ""
    assert "refused" in run([FIT]).stdout


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ([], "$ must be an object"),
        ({"input": {}}, "$.kind is missing"),
        ({"kind": "verify_budget"}, "$.input is missing"),
        ({"kind": "coffee", "input": {}}, "$.kind"),
        (edited(BUDGET, tiers=[8, 2]), "$.input.tiers"),
        (edited(BUDGET, surprise=1), "$.input.surprise"),
        (edited(BUDGET, requests=[]), "$.input.requests"),
        (edited(BUDGET, requests=[{"confidence": [0.5]}]), "$.input.requests[0].confidence"),
        (edited(BUDGET, requests=[{"confidence": [0.5] * 6 + ["x"]}]), "$.input.requests[0].confidence[6]"),
        (edited(BUDGET, requests=[{"confidence": None}] * 3), "$.input.requests"),
        (
            edited(BUDGET, requests=[{"confidence": None, "draft_limit": 8}]),
            "$.input.requests[0].draft_limit",
        ),
        (edited(BUDGET, requests=[{}]), "$.input.requests[0]"),
        (edited(BUDGET, draft_width=5, requests=[{"confidence": None}]), "$.input.table.draft_width"),
        (edited(BUDGET, cost_ms={"2": 1}), "either table or cost_ms"),
        (edited(DEPTH, cost_ms=[1.0]), "$.input.cost_ms"),
        (edited(DEPTH, cost_ms=[1.0, 0.0]), "$.input.cost_ms[1]"),
        (edited(DEPTH, current_depth=2), "$.input.current_depth"),
        (edited(DEPTH, sequences=2), "$.input.sequences"),
        (edited(WINDOWS, batches=[{"depth": 1, "accepted": [2]}]), "$.input.batches[0].accepted[0]"),
        (
            edited(WINDOWS, batches=[{"depth": 2, "accepted": [2], "verified": [1]}]),
            "$.input.batches[0].accepted",
        ),
        (edited(ALLOCATION, target_rows=1), "$.input.target_rows"),
        (edited(ALLOCATION, draft_limit=[1]), "$.input.draft_limit"),
        (edited(FIT, samples=[{"request_bucket": 1}]), "$.input.samples[0].target_rows"),
    ],
)
def test_malformed_cases_name_line_and_field(case: Any, field: str) -> None:
    result = run([DEPTH, case, DEPTH], "--json")
    assert result.exit_code == 3
    [line] = result.stderr.splitlines()
    assert line.startswith("error: stdin line 2: ")
    assert field in line
    assert len(result.stdout.splitlines()) == 1  # the case before it was answered


@pytest.mark.parametrize("text", ["", "   \n", "not json", '{"kind": \n "x"', '{"kind": NaN, "input": {}}'])
def test_text_that_is_no_case(text: str) -> None:
    result = run(text, "--json")
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(explain, [str(tmp_path / "none.json")])
    assert result.exit_code == 3
    assert "none.json" in result.stderr


def test_a_log_line_replays_from_survivals_and_costs() -> None:
    line = {
        "step": 17,
        "kind": "verify_budget",
        "input": {
            "draft_width": 2,
            "request_bucket": 1,
            "tiers": [1, 2, 3],
            "cost_ms": {"1": 10.0, "3": 12.0},
            "requests": [{"survival": [0.8, 0.4]}],
        },
        "decision": {"target_rows": 3},
    }
    answer = json.loads(run([line], "--json").stdout)
    assert answer["target_rows"] == 3
    assert [c["target_rows"] for c in answer["candidates"]] == [1, 3]
    assert answer["candidates"][1]["expected_tokens"] == pytest.approx(2.2)


def test_without_costs_the_answer_is_full_width() -> None:
    answer = json.loads(
        run([edited(BUDGET, table={"model": "sps", "steps_per_second": {"9": 1}})], "--json").stdout
    )
    assert answer == {"target_rows": 16, "candidates": [], "fallback": "no_profile"}


def test_another_table_replaces_the_cases(tmp_path: Path) -> None:
    bare, bundle = tmp_path / "bare.json", tmp_path / "bundle.json"
    bare.write_text(json.dumps({"model": "sps", "steps_per_second": {"2": 100, "16": 99}}))
    write_bundle(bundle, make_bundle())
    assert json.loads(run([BUDGET], "--json", "--table", str(bare)).stdout)["target_rows"] == 16
    ambiguous = run([BUDGET], "--json", "--table", str(bundle))
    assert ambiguous.exit_code == 3
    assert "max_kv_length" in ambiguous.stderr
    answer = json.loads(run([edited(BUDGET, max_kv_length=600)], "--json", "--table", str(bundle)).stdout)
    assert answer["candidates"][0]["cost_ms"] == pytest.approx(22.2)


def test_names_are_printed_as_they_are() -> None:
    assert "[red]case[/red] (draft_depth)" in run([{**DEPTH, "name": "[red]case[/red]"}]).stdout


def samples_file(path: Path, buckets: tuple[int, ...]) -> Path:
    samples = [
        {"request_bucket": b, "target_rows": g, "seconds": [0.01 + 1e-4 * g + 1e-3 * b]}
        for b in buckets
        for g in (b, 2 * b, 8 * b)
    ]
    path.write_text(json.dumps({"model": "additive", "draft_width": 7, "samples": samples}))
    return path


def fit(samples: Path, output: Path) -> Result:
    return CliRunner().invoke(calibrate, ["fit", "--samples", str(samples), "--output", str(output)])


def test_calibrate_fit_writes_a_bare_table(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    result = fit(samples_file(tmp_path / "s.json", (1, 2, 4)), output)
    assert result.exit_code == 0, result.output
    assert "predicted ms" in result.stdout
    assert "relative error" in result.stdout
    table = json.loads(output.read_text())
    assert table["draft_width"] == 7
    expected = fit_costs([CostSample(request_bucket=1, target_rows=1, seconds=(0.0111,))], "sps")
    assert table["bias_seconds"] == pytest.approx(expected.model.cost_ms(1, 1) / 1000)


def test_calibrate_fit_never_replaces_a_file(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    output.write_text("mine")
    result = fit(samples_file(tmp_path / "s.json", (1, 2)), output)
    assert result.exit_code == 3
    assert "exists already" in result.stderr
    assert output.read_text() == "mine"


def test_calibrate_fit_refuses_what_cannot_be_determined(tmp_path: Path) -> None:
    result = fit(samples_file(tmp_path / "s.json", (1, 16)), tmp_path / "t.json")
    assert result.exit_code == 3
    assert "connected" in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_the_commands_import_no_torch_before_they_need_it() -> None:
    code = "import sys, xspec_cli.explain, xspec_cli.calibrate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
