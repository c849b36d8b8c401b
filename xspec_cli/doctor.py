"""`xspec doctor`: what of this machine and installation a launch would meet. Looks only; no torch."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Literal

import click
from rich.markup import escape
from rich.table import Table

from core.builtin import builtin_draft_path
from core.errors import ConfigError, ExitCode
from core.facts import (
    find_devices,
    find_target,
    has_fast_bfloat16,
    memory_bytes,
    read_checkpoint,
    usable_cpus,
)
from core.models.builtin import BUILTIN_NAME, cache_root
from core.options import RETIRED_FLAGS, flag_table, suggest
from xspec_cli.options import wide_console
from xspec_cli.version import versions

OPENMP_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "OMP_PROC_BIND",
    "MKL_NUM_THREADS",
)
# XSPEC_ variables that are no flags.
OTHER_VARIABLES = ("XSPEC_CONFIG", "XSPEC_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. Only `broken` fails the command: no launch with defaults would work."""

    name: str
    status: Literal["ok", "note", "broken"]
    detail: str


def checks() -> list[Check]:
    """All findings, in the order of a launch."""
    return [
        *_packages(),
        *_machine(),
        *_environment(),
        *_builtin_model(),
        *_tools(),
    ]


def _packages() -> list[Check]:
    found = []
    for name, number in versions().items():
        if number is not None:
            found.append(Check(name, "ok", number))
        elif name != "torch_npu":  # optional: the device check says what follows from its absence
            found.append(Check(name, "broken", "not installed: reinstall xspec"))
    return found


def _machine() -> list[Check]:
    present, absent = find_devices()
    found = [Check(f"device {kind}", "ok", "present") for kind in present]
    found += [Check(f"device {kind}", "note", reason) for kind, reason in absent.items()]
    fast = has_fast_bfloat16()
    found.append(
        Check(
            "cpu bfloat16",
            "ok" if fast else "note",
            "fast: dtype auto is bfloat16" if fast else "not native: dtype auto is float32",
        )
    )
    found.append(Check("cpus", "ok", f"{usable_cpus()} usable (default of num_threads)"))
    found.append(Check("memory", "ok", f"{memory_bytes() / 2**30:.1f} GiB"))
    return found


def _environment() -> list[Check]:
    found = [
        Check(name, "note", f"{os.environ[name]}: inherited by the ranks' libraries")
        for name in OPENMP_VARIABLES
        if name in os.environ
    ]
    known = {*OTHER_VARIABLES, *(name for flag in flag_table() for name in flag.envvars)}
    for name in sorted(os.environ):
        if not name.startswith("XSPEC_"):
            continue
        old = RETIRED_FLAGS.get(name.removeprefix("XSPEC_").lower())
        if old is not None:
            found.append(Check(name, "broken", f"retired name, every launch is refused: use {old}"))
        elif name in known:
            found.append(Check(name, "ok", os.environ[name]))
        else:
            found.append(Check(name, "note", f"no xspec variable{suggest(name, known)}"))
    return found


def _builtin_model() -> list[Check]:
    target = find_target(None)
    draft = read_checkpoint(builtin_draft_path())
    found = [
        Check("built-in model", "note" if target.problem else "ok", target.problem or "installed"),
        Check("built-in draft", "broken" if draft.problem else "ok", draft.problem or str(draft.path)),
    ]
    try:
        root = cache_root()
    except ConfigError as error:
        return [*found, Check("model cache", "note", str(error))]
    converted = sorted(path.name for path in root.glob(f"{BUILTIN_NAME}-*") if path.is_dir())
    state = f"converted: {', '.join(converted)}" if converted else "empty: the first start converts the model"
    return [*found, Check("model cache", "ok", f"{root} ({state})")]


def _tools() -> list[Check]:
    path = shutil.which("promtool")
    if path is not None:
        return [Check("promtool", "ok", path)]
    return [
        Check("promtool", "note", "not found: only needed to check metrics and rules (Debian: prometheus)")
    ]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Check this machine and installation; exit code 1 only if something is broken."""
    found = checks()
    broken = any(check.status == "broken" for check in found)
    if as_json:
        click.echo(json.dumps({"ok": not broken, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("check", "status", "detail"):
            table.add_column(heading, overflow="fold")
        styles = {"ok": "green", "note": "yellow", "broken": "bold red"}
        for check in found:
            table.add_row(check.name, f"[{styles[check.status]}]{check.status}[/]", escape(check.detail))
        wide_console().print(table)
    if broken:
        raise SystemExit(int(ExitCode.UNEXPECTED))
