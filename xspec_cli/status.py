"""`xspec status`: one screen about a server, read over HTTP; or one JSON object."""

from __future__ import annotations

import click

from core.errors import ExitCode
from metrics.console import render
from metrics.report import Report
from xspec_cli.monitor import Monitor, Probe
from xspec_cli.watch import (
    WINDOW_SECONDS,
    can_redraw,
    draw_screens,
    print_json,
    print_lines,
    report_console,
    reports,
    to_json,
    until_interrupted,
    url_argument,
    watch_options,
)

TIMEOUT_SECONDS = 5.0


@click.command()
@url_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --watch one per line.")
@click.option("--watch", is_flag=True, help="Look again and again until Ctrl-C.")
@watch_options
def status(url: str, *, as_json: bool, watch: bool, interval: float | None, count: int | None) -> None:
    """Show how a server is.

    URL is its address: a URL, host:port or :port; by default http://127.0.0.1:8000. Figures are totals and
    averages since the server started; with --watch they are those of the last ten seconds.

    Exit codes: 0 if the server answers, 1 if it does not, 8 if its engine has failed. --watch ends with 0.
    """
    if not watch and (interval is not None or count is not None):
        raise click.UsageError("--interval and --count say how to --watch: add it, or drop them")
    if watch:
        with until_interrupted():
            found = reports(url, interval=interval, count=count)
            if as_json:
                print_json(found)
            elif can_redraw():
                draw_screens(found, alternate_screen=False)
            else:
                print_lines(found)
        return
    report = Monitor(Probe(url, timeout_seconds=TIMEOUT_SECONDS).read, window_seconds=WINDOW_SECONDS).look()
    if as_json:
        click.echo(to_json(report))
    elif report.now is None:
        click.echo(f"error: {report.error}", err=True)
    else:
        report_console().print(render(report))
    raise SystemExit(int(exit_code(report)))


def exit_code(report: Report) -> ExitCode:
    if report.now is None:
        return ExitCode.UNEXPECTED
    return ExitCode.RANK_DIED if report.state == "failed" else ExitCode.OK
