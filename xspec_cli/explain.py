"""`xspec explain`: answer policy cases with the code that serving runs, as JSON or as tables with reasons."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from core.errors import ConfigError, ExitCode
from core.spec.cases import Answer, CostFitAnswer, TableOverride, answer_case
from core.spec.draft_depth import AcceptanceWindows, DepthDecision
from core.spec.json_reader import JsonNode, parse_json, read_json
from core.spec.verify_budget import BudgetDecision
from xspec_cli.options import exit_with


@click.command()
@click.argument("case", metavar="CASE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per case.")
@click.option("--table", metavar="FILE", help="Use the costs of this table or bundle instead of the case's.")
def explain(case: str, as_json: bool, table: str | None) -> None:
    """Explain a speculation decision.

    CASE is a file with one case, or with one JSON object per line (such as a decision log), or - for stdin.
    Kinds: verify_budget, prefix_allocation, prefix_acceptance, draft_depth, cost_fit.
    """
    refused = False
    console = Console(markup=False, highlight=False)
    try:
        override = None if table is None else TableOverride(node=read_json(table))
        for node in read_cases(case):
            answer = answer_case(node, allocator=allocate_as_device, table=override)
            refused |= answer.is_refused
            if as_json:
                click.echo(json.dumps(answer.result))
            else:
                show(answer, console)
    except ConfigError as error:
        exit_with(error)
    if refused:
        raise SystemExit(int(ExitCode.CONFIG))


def read_cases(case: str) -> Iterator[JsonNode]:
    """Yield the cases of a file or of stdin ("-"): one object on any number of lines, or one per line."""
    source = "stdin" if case == "-" else case
    text = _read(case)
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{source}: no case in it; give an object with kind and input")
    if len(lines) > 1 and not _is_json(lines[0][1]):
        yield parse_json(text, source)
        return
    for number, line in lines:
        yield parse_json(line, f"{source} line {number}")


def _read(case: str) -> str:
    try:
        return sys.stdin.read() if case == "-" else Path(case).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {case}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{case}: not UTF-8 text") from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def allocate_as_device(
    confidence: npt.NDArray[np.float32], draft_limit: npt.NDArray[np.int64], num_drafts_budget: int
) -> list[int]:
    """Allocate by the device function of serving, run on the CPU."""
    import torch

    from core.spec.allocation import allocate, survival

    with torch.inference_mode():
        products = survival(torch.from_numpy(confidence))
        lengths: list[int] = allocate(products, torch.from_numpy(draft_limit), num_drafts_budget).tolist()
    return lengths


def show(answer: Answer, console: Console) -> None:
    """Print one answer for a reader."""
    title = f"{answer.name} ({answer.kind})" if answer.name else answer.kind
    detail = answer.detail
    if isinstance(detail, BudgetDecision):
        _show_budget(detail, title, console)
    elif isinstance(detail, DepthDecision):
        _show_depth(detail, title, console)
    elif isinstance(detail, AcceptanceWindows):
        _show_windows(detail, title, console)
    elif isinstance(detail, CostFitAnswer):
        show_fit(detail, title, console)
    else:
        _show_allocation(answer, title, console)
    console.print()


def _show_budget(decision: BudgetDecision, title: str, console: Console) -> None:
    best = decision.chosen
    if best is None:
        _say(
            console,
            f"{title}: {decision.target_rows} rows, full width: no cost covers this step ({decision.reason})",
        )
        return
    table = _table(title, "rows G", "expected tokens", "cost ms", "tokens/s", "")
    for c in decision.candidates:
        mark = "chosen" if c is best else _behind(c.tokens_per_second, best.tokens_per_second)
        table.add_row(
            str(c.target_rows),
            f"{c.expected_tokens:.4f}",
            f"{c.cost_ms:.4f}",
            f"{c.tokens_per_second:.2f}",
            mark,
        )
    console.print(table)
    _say(
        console,
        f"{best.target_rows} rows win: {best.expected_tokens:.4f} tokens in {best.cost_ms:.4f} ms is the "
        "highest predicted throughput; ties go to fewer rows",
    )


def _show_depth(decision: DepthDecision, title: str, console: Console) -> None:
    chosen = decision.chosen
    if chosen is None:
        _say(console, f"{title}: depth {decision.depth}, because no cost covers this bucket")
        return
    table = _table(title, "depth", "expected tokens", "cost ms", "tokens/s", "")
    for c in decision.candidates:
        mark = "chosen" if c is chosen else _behind(c.tokens_per_second, chosen.tokens_per_second)
        table.add_row(
            str(c.depth), f"{c.expected_tokens:.4f}", f"{c.cost_ms:.4f}", f"{c.tokens_per_second:.2f}", mark
        )
    console.print(table)
    reasons = {
        "first": "has the highest predicted throughput; there was no depth to leave",
        "best": "gains more than switch_min_gain over the current depth",
        "kept": "stays: no depth gains more than switch_min_gain over it",
    }
    _say(console, f"depth {decision.depth} {reasons[decision.reason]}")


def _show_windows(windows: AcceptanceWindows, title: str, console: Console) -> None:
    table = _table(title, "position", "batches observed", "prefix acceptance")
    for position, rate in enumerate(windows.prefix_acceptance(), 1):
        batches = windows.observations(position)
        table.add_row(str(position), str(batches) if batches else "none: extrapolated", f"{rate:.6f}")
    console.print(table)
    _say(console, f"{windows.completed} completed batches; older than {windows.horizon} is expired")


def show_fit(answer: CostFitAnswer, title: str, console: Console) -> None:
    """Print predicted beside measured costs, or why there is no fit."""
    if answer.fit is None:
        _say(console, f"{title}: refused: {answer.refusal}")
        return
    table = _table(title, "bucket", "rows G", "measured ms", "predicted ms", "error")
    for sample, predicted in zip(answer.samples, answer.fit.predicted_ms, strict=True):
        measured = 1000.0 * sample.median_seconds
        table.add_row(
            str(sample.request_bucket),
            str(sample.target_rows),
            f"{measured:.4f}",
            f"{predicted:.4f}",
            f"{predicted / measured - 1.0:+.2%}",
        )
    console.print(table)
    _say(
        console,
        f"relative error: max {answer.fit.max_relative_error:.2%}, mean {answer.fit.mean_relative_error:.2%}",
    )


def _show_allocation(answer: Answer, title: str, console: Console) -> None:
    lengths = answer.result["verify_lengths"]
    assert isinstance(lengths, list)
    table = _table(title, "sequence", "drafts verified")
    for row, length in enumerate(lengths):
        table.add_row(str(row), str(length))
    console.print(table)
    _say(
        console,
        f"{sum(lengths)} draft rows beside {len(lengths)} anchors: the highest survivals within the limits",
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, soft_wrap=True)


def _behind(rate: float, best: float) -> str:
    return f"{rate / best - 1.0:+.2%}"
