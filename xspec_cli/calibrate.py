"""`xspec calibrate`: work with measured step costs without a model."""

from __future__ import annotations

import json

import click
from rich.console import Console

from core.errors import ConfigError, XspecError
from core.spec.cases import CostFitAnswer, fit_samples, samples_from_json
from core.spec.costs import CostSample, shape_report
from core.spec.exclusive_file import check_output_path, write_exclusive
from core.spec.json_reader import read_json
from xspec_cli.explain import show_fit
from xspec_cli.options import exit_with


@click.group()
def calibrate() -> None:
    """Work with measured step costs."""


@calibrate.command()
@click.option("--samples", metavar="FILE", required=True, help="Measured step times, JSON.")
@click.option("--output", metavar="FILE", required=True, help="New file for the bare cost table.")
def fit(samples: str, output: str) -> None:
    """Fit a cost table to saved samples.

    The samples are {"model": "additive" or "sps", "draft_width": 7, "samples": [{"request_bucket": 4,
    "target_rows": 16, "seconds": [0.061, 0.063]}, ...]}: for each pair of a number of sequences and a number of
    verified rows, times of one whole step.

    Writes a bare table: it can be given as adaptive_target_verify_cost_table, but says nothing of the models
    and the device that it holds for.
    """
    try:
        problem = check_output_path(output)
        if problem is not None:
            raise ConfigError(problem)
        model, draft_width, points = samples_from_json(read_json(samples))
        fitted = fit_samples(model, points)
        table = {"draft_width": draft_width, **fitted.model.to_json()}
        write_exclusive(output, json.dumps(table, indent=1, allow_nan=False) + "\n")
    except XspecError as error:
        exit_with(error)
    console = Console(markup=False, highlight=False)
    show_fit(CostFitAnswer(samples=points, fit=fitted), f"{model} fit, draft width {draft_width}", console)
    for line in shape_report(fitted.model, _grid(points)):
        console.print(f"note: {line}", soft_wrap=True)
    console.print(f"wrote {output}", soft_wrap=True)


def _grid(points: tuple[CostSample, ...]) -> dict[int, list[int]]:
    grid: dict[int, list[int]] = {}
    for point in points:
        grid.setdefault(point.request_bucket, []).append(point.target_rows)
    return grid
