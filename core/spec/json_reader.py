"""Strict reading of JSON files that users hand in: every refusal names the file and the JSON path of the
fault.

Knows nothing of what the files mean. NaN, Infinity and repeated keys, which Python's parser lets through, are
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from core.errors import ConfigError

MAX_SHOWN = 60  # characters of a refused value that a message repeats


class JsonNode:
    """A JSON value that knows its place (`$.policy.window_size`); the readers return plain Python values."""

    __slots__ = ("path", "source", "value")

    def __init__(self, value: object, source: str, path: str = "$") -> None:
        self.value = value
        self.source = source
        self.path = path

    def refuse(self, expected: str) -> NoReturn:
        """Raise the error that says where, what was expected and what is there."""
        shown = json.dumps(self.value, default=str)
        if len(shown) > MAX_SHOWN:
            shown = shown[:MAX_SHOWN] + "..."
        raise ConfigError(f"{self.source}: {self.path} {expected}, got {shown}")

    def fields(self, *, required: Iterable[str] = (), optional: Iterable[str] = ()) -> dict[str, JsonNode]:
        """Read an object with known keys. Unknown keys and absent required keys are refused."""
        required = tuple(required)
        known = {*required, *optional}
        nodes = self._members()
        for key in nodes:
            if key not in known:
                raise ConfigError(
                    f"{self.source}: {self.path}.{key} is not a known key ({', '.join(sorted(known))})"
                )
        for key in required:
            if key not in nodes:
                raise ConfigError(f"{self.source}: {self.path}.{key} is missing")
        return nodes

    def int_keys(self) -> dict[int, JsonNode]:
        """Read a non-empty object whose keys are positive integers ("8": ...), in ascending order."""
        nodes: dict[int, JsonNode] = {}
        for key, node in self._members().items():
            if not key.isascii() or not key.isdigit() or str(int(key)) != key or int(key) < 1:
                raise ConfigError(
                    f"{self.source}: {self.path} has the key {key!r}, which is not a positive integer"
                )
            nodes[int(key)] = node
        if not nodes:
            self.refuse("must not be empty")
        return dict(sorted(nodes.items()))

    def items(self, *, at_least: int = 0) -> list[JsonNode]:
        """Read a list with at least so many entries."""
        if not isinstance(self.value, list):
            self.refuse("must be a list")
        if len(self.value) < at_least:
            self.refuse(f"must have at least {at_least} entries")
        return [JsonNode(v, self.source, f"{self.path}[{i}]") for i, v in enumerate(self.value)]

    def integer(self, *, at_least: int, at_most: int | None = None) -> int:
        """Read an integer in the closed range; 3.0 and true are no integers."""
        bounds = f">= {at_least}" if at_most is None else f"in {at_least}..{at_most}"
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.refuse(f"must be an integer {bounds}")
        if self.value < at_least or (at_most is not None and self.value > at_most):
            self.refuse(f"must be an integer {bounds}")
        return self.value

    def ascending_integers(self, *, at_least: int) -> tuple[int, ...]:
        """Read a non-empty list of strictly ascending integers."""
        values = tuple(node.integer(at_least=at_least) for node in self.items(at_least=1))
        if any(b <= a for a, b in pairwise(values)):
            self.refuse("must be strictly ascending")
        return values

    def number(self, *, at_least: float | None = None, above: float | None = None) -> float:
        """Read a finite number, optionally bounded from below (closed or open)."""
        bound = f" >= {at_least:g}" if at_least is not None else f" > {above:g}" if above is not None else ""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.refuse(f"must be a number{bound}")
        try:
            value = float(self.value)
        except OverflowError:
            self.refuse(f"must be a finite number{bound}")
        if not math.isfinite(value):
            self.refuse(f"must be a finite number{bound}")
        if (at_least is not None and value < at_least) or (above is not None and value <= above):
            self.refuse(f"must be a number{bound}")
        return value

    def string(self, choices: Iterable[str] = ()) -> str:
        """Read a string, one of `choices` if there are any."""
        choices = tuple(choices)
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            self.refuse(f"must be one of: {', '.join(choices)}" if choices else "must be a string")
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse("must be true or false")
        return self.value

    def _members(self) -> dict[str, JsonNode]:
        if not isinstance(self.value, dict):
            self.refuse("must be an object")
        return {key: JsonNode(v, self.source, f"{self.path}.{key}") for key, v in self.value.items()}


def parse_json(text: str, source: str) -> JsonNode:
    """Parse `text`; `source` (a path, "line 3 of x.jsonl") starts every message about it."""

    def refuse_constant(name: str) -> NoReturn:
        raise ConfigError(f"{source}: {name} is not a number that JSON knows; write null or a finite number")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            repeated = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise ConfigError(f"{source}: the key {repeated!r} appears twice in one object")
        return members

    try:
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not valid JSON, truncated or edited? "
            f"({error.msg} at line {error.lineno} column {error.colno})"
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid here: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{source}: not valid JSON ({error})") from None
    return JsonNode(value, source)


def read_json(path: Path | str) -> JsonNode:
    """Read one JSON file; a file that cannot be read is a ConfigError that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not valid JSON (not UTF-8 text)") from None
    return parse_json(text, str(path))
