"""The keys that clients must show: read once, from a file or the environment, and kept as digests only.

Never from the command line, which every process of the machine can read. Nothing here judges: what is wrong
with a source is a sentence in `problem`, and `core.resolve` refuses the launch with it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "XSPEC_API_KEY"
MAX_FILE_BYTES = 65536
# What fits behind "Authorization: Bearer " unchanged.
_KEY = re.compile(rb"[!-~]{1,1024}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """SHA-256 of each key, in hexadecimal; none without keys. `problem` says why they could not be read."""

    digests: tuple[str, ...] = ()
    problem: str = ""


def find_api_keys(file: str | None, environ: Mapping[str, str]) -> ApiKeys:
    """Read the keys of `file` (one a line) or the one of XSPEC_API_KEY.

    An empty source is a problem, not an open server: whoever names one wants the server closed.
    """
    inline = environ.get(VARIABLE)
    if file is not None and inline is not None:
        return ApiKeys(
            problem=f"api_key_file={file} and the variable {VARIABLE} exclude each other: keep one"
        )
    if file is not None:
        return _read_file(file)
    if inline is None:
        return ApiKeys()
    return _digests([inline.encode(errors="surrogateescape").strip()], source=f"the variable {VARIABLE}")


def _read_file(name: str) -> ApiKeys:
    source = f"api_key_file={name}"
    try:
        with Path(name).expanduser().open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        return ApiKeys(
            problem=f"{source} cannot be read ({reason}): name a readable file with one key a line"
        )
    if len(content) > MAX_FILE_BYTES:
        return ApiKeys(problem=f"{source} is larger than {MAX_FILE_BYTES} bytes: name a file with keys only")
    return _digests([line.strip() for line in content.splitlines() if line.strip()], source=source)


def _digests(keys: list[bytes], *, source: str) -> ApiKeys:
    if not any(keys):
        return ApiKeys(problem=f"{source} holds no key: put one in, or drop it to serve without a key")
    for number, key in enumerate(keys, start=1):
        if _KEY.fullmatch(key) is None:  # the message names its place, never the key
            return ApiKeys(
                problem=f"{source}: key {number} cannot be sent in a header: use 1 to 1024 printable ASCII "
                "characters without spaces"
            )
    return ApiKeys(digests=tuple(dict.fromkeys(hashlib.sha256(key).hexdigest() for key in keys)))
