"""Result files that are never half written and never replace an older one: costs are minutes of measuring."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from core.errors import CalibrationError


def check_output_path(path: Path | str) -> str | None:
    """Say why `path` cannot be created later, or None. Only looks: `resolve` asks before the model loads."""
    path = Path(path)
    if os.path.lexists(path):
        return f"{path} exists already: name a new file, or remove it"
    if not path.parent.is_dir():
        return f"{path.parent} is not a directory: create it before writing {path.name} there"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent} is not writable: {path.name} could not be created there"
    return None


def write_exclusive(path: Path | str, text: str) -> None:
    """Create `path` with `text` completely or not at all, and never over an existing file.

    Written under a temporary name in the same directory, synced, then linked to the final name, which fails
    if that was taken meanwhile. A failure is a CalibrationError (exit code 7) that names the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with _unlinked_afterwards(temporary):
            _write_synced(temporary, text.encode())
            _publish(temporary, path)
        _sync_directory(path.parent)
    except FileExistsError:
        raise CalibrationError(f"could not write {path}: it exists already; name a new file") from None
    except OSError as error:
        raise CalibrationError(f"could not write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _unlinked_afterwards(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        view = memoryview(content)
        while view:
            written = os.write(descriptor, view)
            view = view[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here (FAT, some network mounts): take the name, then replace that empty file.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()
            raise


def _sync_directory(path: Path) -> None:
    """Make the new name survive a crash; where directories cannot be synced the file is still whole."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
