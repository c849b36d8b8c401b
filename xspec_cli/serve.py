"""`xspec serve`: a model behind an OpenAI-compatible HTTP API, until it is told to stop."""

from __future__ import annotations

import click

from xspec_cli.options import LaunchCommand, launch_options, resolve_or_exit
from xspec_cli.sources import Launch


@click.command("serve", cls=LaunchCommand)
@launch_options
def serve(launch: Launch) -> None:
    """Serve a model over HTTP.

    Without --model the built-in SmolLM2-135M-Instruct. Ctrl-C lets running requests finish, then stops; again
    stops at once.
    """
    config = resolve_or_exit(launch)

    from core.launcher import launch_server
    from core.logs import configure_logging
    from xspec_cli.startup import LaunchView, current_stderr

    server = config.server
    configure_logging(format=server.log_format, level=server.log_level, stream=current_stderr())
    raise SystemExit(launch_server(config, LaunchView()))
