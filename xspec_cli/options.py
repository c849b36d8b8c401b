"""Click options generated from the flag table, and the two helpers that commands use.

    @click.command("serve", cls=LaunchCommand)
    @launch_options
    def serve(launch: Launch) -> None:
        config = resolve_or_exit(launch)

Underscores and dashes are alike through the context's `token_normalize_func`, which `xspec_cli.main` sets.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from core.errors import ConfigError, XspecError
from core.options import RETIRED_FLAGS, Flag, FlagValue, Group, flag_table
from xspec_cli.sources import Launch, collect

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import EngineConfig

__all__ = ["Launch", "LaunchCommand", "exit_with", "launch_options", "resolve_or_exit", "wide_console"]

PIPE_WIDTH = 200


class _FlagType(click.ParamType[FlagValue]):
    """Parses with the flag's own rules, so that command line and environment agree."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.name = flag.type.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FlagValue:
        try:
            return self.flag.parse(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}.", param, ctx)


class LaunchOption(click.Option):
    """One launch flag; `group` is its heading on the help page."""

    def __init__(self, flag: Flag) -> None:
        # Any flag_value, None too, makes click accept the option without a value.
        bare: dict[str, Any] = {"flag_value": "true"} if flag.type is bool else {}
        super().__init__(
            [f"--{name}" for name in (flag.name, *flag.aliases)] + [flag.name],
            type=_FlagType(flag),
            default=None,
            is_flag=False,
            metavar=flag_metavar(flag),
            help=flag_help(flag),
            **bare,
        )
        self.group = flag.group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        # "--flag[=true|false]": the value goes behind an equals sign only.
        return None if record is None else (record[0].replace(" [=", "[="), record[1])


class LaunchCommand(click.Command):
    """A command whose help shows launch flags under their headings and whose booleans need no value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _complete_booleans(args))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        sections.update((group, []) for group in Group)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections[getattr(param, "group", "Options")].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def flag_metavar(flag: Flag) -> str:
    if flag.choices:
        return "|".join(flag.choices)
    if flag.type is bool:
        return "[=true|false]"
    return "PATH" if flag.is_path else {int: "N", float: "NUMBER", str: "TEXT"}[flag.type]


def flag_default(flag: Flag) -> str:
    """The default as one would type it; empty if the help text explains it."""
    if flag.default is None:
        return ""
    return str(flag.default).lower() if flag.type is bool else str(flag.default)


def flag_help(flag: Flag) -> str:
    default = flag_default(flag)
    return f"{flag.help}  [default: {default}]" if default else flag.help


@functools.cache
def _boolean_names() -> frozenset[str]:
    names = [name for flag in flag_table() if flag.type is bool for name in (flag.name, *flag.aliases)]
    return frozenset("--" + name.replace("_", "-") for name in (*names, *RETIRED_FLAGS))


def _complete_booleans(args: Sequence[str]) -> list[str]:
    """Write a bare `--flag` as `--flag=true`, so that it never swallows an argument behind it.

    `--flag true` and `--flag false` are read as meant: as an argument the word would be a surprise.
    """
    completed: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*completed, word, *words]
        if word.replace("_", "-") in _boolean_names():
            value = words.pop(0) if words and words[0].lower() in ("true", "false") else "true"
            word = f"{word}={value}"
        completed.append(word)
    return completed


def launch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add every launch flag and --config; the command receives one `launch: Launch` instead."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        names = [flag.name for flag in flag_table()]
        given = {name: value for name in names if (value := kwargs.pop(name)) is not None}
        retired = [name for name in RETIRED_FLAGS if kwargs.pop(f"retired_{name}") is not None]
        config_file: Path | None = kwargs.pop("config_file")
        try:
            launch = collect(given, retired=retired, environ=os.environ, config_file=config_file)
        except ConfigError as error:
            exit_with(error)
        return function(*args, launch=launch, **kwargs)

    params: list[click.Parameter] = [
        click.Option(
            ["--config", "config_file"],
            type=click.Path(path_type=Path),
            envvar="XSPEC_CONFIG",
            metavar="FILE",
            help="TOML file with flags as keys. The command line and XSPEC_<FLAG> variables win over it.",
        )
    ]
    params += [LaunchOption(flag) for flag in flag_table()]
    params += [
        click.Option([f"--{name}", f"retired_{name}"], is_flag=False, flag_value="true", hidden=True)
        for name in RETIRED_FLAGS
    ]
    # As click's own decorators do: they are applied bottom up, so the list is kept in reverse.
    attached: Any = command
    attached.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(params)]
    return command


def resolve_or_exit(launch: Launch) -> EngineConfig:
    """The effective configuration, or a message on stderr and the exit code of what is wrong."""
    from core.resolve import gather_facts, resolve

    try:
        return resolve(launch.options, gather_facts(launch.options), launch.sources)
    except XspecError as error:
        exit_with(error)


def wide_console() -> Console:
    """Stdout for tables: as wide as the terminal, and never folded for a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def exit_with(error: XspecError) -> NoReturn:
    """Say what is wrong in one line, or one line per problem, and end with the error's exit code."""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if len(problems) == 1:
        click.echo(f"error: {problems[0]}", err=True)
    else:
        click.echo(f"error: {len(problems)} settings are refused:", err=True)
        for problem in problems:
            click.echo(f"  - {problem}", err=True)
    raise SystemExit(int(error.exit_code))
