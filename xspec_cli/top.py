"""`xspec top`: a server's figures of the last seconds, live, read over HTTP."""

from __future__ import annotations

import click

from xspec_cli.watch import (
    can_redraw,
    draw_screens,
    print_lines,
    reports,
    until_interrupted,
    url_argument,
    watch_options,
)


@click.command()
@url_argument
@watch_options
def top(url: str, *, interval: float | None, count: int | None) -> None:
    """Watch a server live.

    URL is its address: a URL, host:port or :port; by default http://127.0.0.1:8000. Rates, latencies and
    acceptance are those of the last ten seconds. A server that is down or silent is shown as that, and picked
    up again when it comes back.

    On a terminal one screen that redraws itself; into a pipe, and on a terminal that cannot redraw, one line
    of key=value per look. Ctrl-C (or SIGTERM) restores the screen and exits with 0.
    """
    with until_interrupted():
        found = reports(url, interval=interval, count=count)
        if can_redraw():
            draw_screens(found, alternate_screen=True)
        else:
            print_lines(found)
