"""Write docs/cli.md from the commands themselves: `python -m xspec_cli.reference [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from core.errors import ExitCode
from core.options import Flag, Group, flag_table
from xspec_cli.main import COMMANDS, cli
from xspec_cli.options import LaunchCommand, LaunchOption, flag_default, flag_metavar

PATH = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

HEAD = """\
# Command line

Written by `python -m xspec_cli.reference`; do not edit.

Flags are spelled with underscores or dashes (`--num_speculative_tokens 5`, `--num-speculative-tokens=5`).
A boolean takes `=true`, `=false` or nothing. A value comes from the command line, else from the variable
`XSPEC_<FLAG>`, else from the TOML file that `--config` names (keys are flag names), else from the default;
`xspec config show` prints which.

An API key is no flag: it stands in the file that `api_key_file` names or in `XSPEC_API_KEY`, never on a command
line, and no command prints it.
"""

EXIT_CODES = {
    ExitCode.OK: "ok, or a clean drain",
    ExitCode.UNEXPECTED: "unexpected",
    ExitCode.USAGE: "usage",
    ExitCode.CONFIG: "configuration",
    ExitCode.MODEL_LOAD: "model load",
    ExitCode.DEVICE: "device unavailable",
    ExitCode.ADDRESS_IN_USE: "address in use",
    ExitCode.CALIBRATION: "calibration",
    ExitCode.RANK_DIED: "a rank or the engine died",
    ExitCode.DRAIN_FORCED: "drain forced",
    ExitCode.INTERRUPTED: "interrupted twice, or during startup",
}


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Commands\n"]
    context = click.Context(cli, info_name="xspec", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None, name
        parts += _command(command, f"xspec {name}", context)
    parts.append("## Launch flags\n")
    for group in Group:
        parts.append(f"### {group}\n")
        parts.append(_table(flag for flag in flag_table() if flag.group == group))
    parts.append("## Exit codes\n")
    parts.append(
        "\n".join(
            ["| code | meaning |", "|---|---|", *(f"| {int(c)} | {text} |" for c, text in EXIT_CODES.items())]
        )
    )
    return "\n".join(parts).rstrip() + "\n"


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """A command's heading, text and own options; then its subcommands."""
    yield f"### {name}\n"
    for paragraph in (command.help or "").split("\n\n"):
        yield " ".join(paragraph.split()) + "\n"
    if isinstance(command, click.Group):
        for child, subcommand in command.commands.items():
            yield from _command(subcommand, f"{name} {child}", parent)
        return
    # The parent matters: commands keep the help option that their first context gave them.
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"    {name} {usage}\n"
    rows = [_option_row(param) for param in command.params if _is_own(param)]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"
    if isinstance(command, LaunchCommand) and any(isinstance(p, LaunchOption) for p in command.params):
        yield "And all [launch flags](#launch-flags).\n"


def _is_own(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not isinstance(param, LaunchOption) and not param.hidden


def _option_row(param: click.Parameter) -> str:
    record = param.get_help_record(click.Context(click.Command("xspec")))
    assert record is not None
    meaning = " ".join(record[1].split()).replace("<", "&lt;")
    return f"| `{_cell(record[0])}` | {_cell(meaning)} |"


def _table(flags: Iterator[Flag]) -> str:
    rows = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for flag in flags:
        names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
        values = "true, false" if flag.type is bool else flag_metavar(flag).replace("|", ", ")
        default = flag_default(flag)
        rows.append(f"| {names} | {values} | {f'`{default}`' if default else ''} | {_cell(flag.help)} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or with --check say whether the committed one is current."""
    text = render()
    if arguments == ["--check"]:
        if PATH.is_file() and PATH.read_text(encoding="utf-8") == text:
            return ExitCode.OK
        print(
            "docs/cli.md is not what the commands say: run `python -m xspec_cli.reference`", file=sys.stderr
        )
        return ExitCode.UNEXPECTED
    if arguments:
        print("usage: python -m xspec_cli.reference [--check]", file=sys.stderr)
        return ExitCode.USAGE
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text, encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
