"""`xspec config`: every flag with its value and where it came from, and the schema of the file format."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from core.config import to_plain
from core.options import Flag, flag_table
from xspec_cli.options import LaunchCommand, launch_options, resolve_or_exit, wide_console
from xspec_cli.sources import DEFAULT, Launch


@click.group()
def config() -> None:
    """Show the configuration and describe its file format."""


@config.command(cls=LaunchCommand)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--effective",
    is_flag=True,
    help="Resolve the flags as a launch would and print the effective configuration as JSON.",
)
@launch_options
def show(launch: Launch, as_json: bool, effective: bool) -> None:
    """Print each flag's value and its source: command line, environment, file or default.

    Values are shown as given; a combination that a launch refuses is shown too. With --effective it is
    refused as the launch would refuse it.
    """
    if effective:
        click.echo(json.dumps(to_plain(resolve_or_exit(launch)), indent=2))
        return
    rows = {
        flag.name: {"value": getattr(launch.options, flag.name), "source": launch.sources[flag.name]}
        for flag in flag_table()
    }
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("flag", "value", "source"):
        table.add_column(heading, overflow="fold")
    group = ""
    for flag in flag_table():
        if flag.group != group:
            if group:
                table.add_section()
            group = flag.group
        value, source = rows[flag.name]["value"], rows[flag.name]["source"]
        style = "dim" if source == DEFAULT else "bold"
        table.add_row(flag.name, _shown(value), source, style=style)
    wide_console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


@config.command()
def schema() -> None:
    """Print the JSON Schema of a configuration file (TOML; keys are flag names)."""
    click.echo(json.dumps(file_schema(), indent=2))


def file_schema() -> dict[str, Any]:
    """JSON Schema of what --config accepts. Aliases are listed, dashed spellings are not."""
    properties = {name: _property(flag) for flag in flag_table() for name in (flag.name, *flag.aliases)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "xspec launch configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(flag: Flag) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    described: dict[str, Any] = {"type": kinds[flag.type], "description": flag.help}
    if flag.choices:
        described["enum"] = list(flag.choices)
    if flag.minimum is not None:
        described["minimum"] = flag.minimum
    if flag.maximum is not None:
        described["maximum"] = flag.maximum
    if flag.default is not None:
        described["default"] = flag.default
    return described
