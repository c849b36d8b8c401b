"""`xspec serve` with scripted ranks: `python -m tests.launch_fake CONFIG.json [SILENT_SECONDS]`."""

from __future__ import annotations

import sys
from pathlib import Path

from core.config_codec import decode_config
from core.errors import XspecError
from core.launcher import launch_server
from core.logs import configure_logging
from core.server import pulse
from xspec_cli.options import exit_with
from xspec_cli.startup import LaunchView, current_stderr


def main() -> None:
    config = decode_config(Path(sys.argv[1]).read_bytes())
    if len(sys.argv) > 2:
        pulse.SILENT_SECONDS = float(sys.argv[2])
    configure_logging(format=config.server.log_format, level=config.server.log_level, stream=current_stderr())
    try:
        code = launch_server(config, LaunchView(), rank_module="tests.fake_rank")
    except XspecError as error:
        exit_with(error)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
