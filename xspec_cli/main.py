"""The `xspec` command: a group that imports a subcommand only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

import click

from core.errors import ExitCode, XspecError
from xspec_cli.options import exit_with

# name -> ("module:attribute", one line for `xspec --help`). Nothing is imported before it is used.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("xspec_cli.serve:serve", "Serve a model over HTTP."),
    "generate": ("xspec_cli.generate:generate", "Generate once and print, without a server."),
    "status": ("xspec_cli.status:status", "Show how a server is: load, latencies, acceptance, budget."),
    "top": ("xspec_cli.top:top", "Watch a server live."),
    "calibrate": ("xspec_cli.calibrate:calibrate", "Work with measured step costs."),
    "explain": ("xspec_cli.explain:explain", "Explain a speculation decision."),
    "config": ("xspec_cli.config:config", "Show flags, where their values come from, and their schema."),
    "doctor": ("xspec_cli.doctor:doctor", "Check this machine and installation."),
    "version": ("xspec_cli.version:version", "Print versions."),
}


class LazyGroup(click.Group):
    """Looks subcommands up in a table and turns every user fault into one line and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from core.options import suggest

            ctx.fail(f"No such command {args[0]!r}{suggest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> Any:
        run: Any = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        try:
            result = run(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            _exit_with_usage(error)
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        except XspecError as error:
            exit_with(error)
        except BrokenPipeError:  # `xspec ... | head`: nobody reads on, which is no fault of ours
            sys.stderr.close()
            sys.exit(ExitCode.UNEXPECTED)
        # Without standalone mode click returns what ctx.exit() was given.
        sys.exit(result if isinstance(result, int) else ExitCode.OK)


def _exit_with_usage(error: click.ClickException) -> NoReturn:
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.message, err=True)
    else:
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        click.echo(f"error: {error.format_message()}{hint}", err=True)
    sys.exit(error.exit_code)


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 110,
    },
)
@click.version_option(package_name="xspec", prog_name="xspec", message="%(prog)s %(version)s")
def cli() -> None:
    """LLM serving with adaptive, lossless speculative decoding."""


def main() -> None:
    """Entry point of the `xspec` script."""
    cli(prog_name="xspec")
