"""Where launch values come from: command line, XSPEC_* environment, TOML file, default; the first wins."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ConfigError
from core.options import (
    RETIRED_FLAGS,
    Flag,
    FlagValue,
    LaunchOptions,
    flag_table,
    flags_by_name,
    suggest,
)

COMMAND_LINE = "command line"
ENVIRONMENT = "environment"
FILE = "file"
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Raw options and, per flag, the layer that set it."""

    options: LaunchOptions
    sources: Mapping[str, str]


@dataclass(slots=True)
class _Layer:
    """What one source says. `retired` holds old names that it used."""

    values: dict[str, FlagValue] = field(default_factory=dict)
    retired: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(
    command_line: Mapping[str, FlagValue],
    *,
    retired: Sequence[str] = (),
    environ: Mapping[str, str],
    config_file: Path | None,
) -> Launch:
    """Merge the layers. Raise one ConfigError with everything that environment and file have wrong."""
    environment = _read_environment(environ)
    file = _read_toml(config_file) if config_file is not None else _Layer()
    problems = environment.problems + file.problems
    if problems:
        raise ConfigError(problems)
    layers = (
        (COMMAND_LINE, command_line),
        (ENVIRONMENT, environment.values),
        (FILE, file.values),
    )
    values: dict[str, FlagValue] = {}
    sources: dict[str, str] = {}
    for flag in flag_table():
        sources[flag.name] = DEFAULT
        for source, layer in layers:
            if flag.name in layer:
                values[flag.name], sources[flag.name] = layer[flag.name], source
                break
    old_names = dict.fromkeys([*retired, *environment.retired, *file.retired])
    options = LaunchOptions(**values, retired=tuple(old_names))  # type: ignore[arg-type]
    return Launch(options=options, sources=sources)


def _read_environment(environ: Mapping[str, str]) -> _Layer:
    """Values of XSPEC_<FLAG>. An empty one counts as not set, as a shell cannot unset for one command."""
    layer = _Layer()
    layer.retired = [name for name in RETIRED_FLAGS if environ.get(f"XSPEC_{name.upper()}")]
    for flag in flag_table():
        used = [name for name in flag.envvars if environ.get(name)]
        if len(used) > 1:
            layer.problems.append(f"{' and '.join(used)} are two names of one flag: unset one of them")
        elif used:
            try:
                layer.values[flag.name] = flag.parse(environ[used[0]])
            except ValueError as error:
                layer.problems.append(f"{used[0]}={environ[used[0]]!r}: {error}")
    return layer


def _read_toml(path: Path) -> _Layer:
    layer = _Layer()
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        layer.problems.append(f"config={str(path)!r} cannot be read: {error.strerror}")
        return layer
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        layer.problems.append(f"config={str(path)!r} is not valid TOML: {error}")
        return layer
    known = flags_by_name()
    spelling: dict[str, str] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name in RETIRED_FLAGS:
            layer.retired.append(name)
        elif name not in known:
            layer.problems.append(f"config={str(path)!r}: unknown key {key!r}{suggest(name, known)}")
        elif known[name].name in spelling:
            first = spelling[known[name].name]
            layer.problems.append(
                f"config={str(path)!r}: {first!r} and {key!r} are one flag: keep one of them"
            )
        else:
            spelling[known[name].name] = key
            _accept(layer, path, key, known[name], value)
    return layer


def _accept(layer: _Layer, path: Path, key: str, flag: Flag, value: object) -> None:
    try:
        layer.values[flag.name] = flag.accept(value)
    except ValueError as error:
        layer.problems.append(f"config={str(path)!r}: {key} = {value!r}: {error}")
