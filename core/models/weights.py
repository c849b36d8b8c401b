"""Checkpoints on disk: config.json, safetensors files streamed tensor by tensor, and a cheap fingerprint.

Knows file formats, not architectures: a model says which tensor goes where by `weight_slots`. Importing this
module does not import torch, so that the parent process may read configs and fingerprints.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from core.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

    from core.models.base import TargetModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EDGE_BYTES = 64 * 1024
_NAMES_SHOWN = 5


def load_config(path: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory."""
    if not path.is_dir():
        raise ModelLoadError(
            f"{path} is not a directory; give a Hugging Face model directory with a config.json"
        )
    return _read_json_object(path / "config.json")


def load_target(
    path: Path, *, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
) -> TargetModel:
    """Build the model that config.json names and fill it. max_positions: None takes the config's limit."""
    from core.models.base import model_class

    config = load_config(path)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"{path / 'config.json'}: weights quantised with {method!r} are not supported; "
            "use a bfloat16, float16 or float32 checkpoint"
        )
    model = model_class(config)(config, dtype=dtype, device=device, max_positions=max_positions)
    load_tensors(path, model.weight_slots(), ignore=model.ignores_weight)
    model.pack()
    return model


def load_tensors(
    path: Path, slots: dict[str, torch.Tensor], *, ignore: Callable[[str], bool] = lambda name: False
) -> None:
    """Copy every tensor of a checkpoint into its slot, a view of a parameter, cast to the slot's dtype.

    Each slot must be filled exactly once and each tensor must have a slot, unless `ignore(name)`.
    """
    pending = dict(slots)
    unexpected = []
    for file in shard_files(path):
        with open_shard(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if ignore(name):
                    continue
                if name in pending:
                    _fill(pending.pop(name), file, name, handle)
                elif name in slots:
                    raise ModelLoadError(f"{file}: tensor {name!r} was already found in another shard")
                else:
                    unexpected.append(name)
    problems = []
    if pending:
        problems.append(f"missing tensors: {_listed(sorted(pending))}")
    if unexpected:
        problems.append(f"unexpected tensors: {_listed(sorted(unexpected))}")
    if problems:
        raise ModelLoadError(
            f"{path}: {'; '.join(problems)}; the weights do not belong to this config.json, "
            "or the download is incomplete"
        )


def shard_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in name order."""
    index = path / INDEX_FILE
    if not index.exists():
        single = path / SINGLE_FILE
        if not single.exists():
            raise ModelLoadError(
                f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read"
            )
        return [single]
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: 'weight_map' is missing or empty; download the file again")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: shard {name!r} is not a plain file name")
        if not (path / name).exists():
            raise ModelLoadError(
                f"{path / name}: this shard is named in {INDEX_FILE} but missing; download it again"
            )
        files.append(path / name)
    return files


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """Open a safetensors file for torch; damage found inside the block is reported with the file's name."""
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file}: cannot be read ({error}); it is damaged or truncated, download it again"
        ) from error


def fingerprint(path: Path) -> str:
    """sha256 over config.json and, per shard, its size, safetensors header, first and last 64 KiB (hex)."""
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))  # framed: no two splits of the same bytes are equal
        digest.update(data)

    try:
        add((path / "config.json").read_bytes())
        for file in shard_files(path):
            size = file.stat().st_size
            with file.open("rb") as stream:
                header_size = int.from_bytes(stream.read(8), "little")
                if header_size > size - 8:
                    raise ModelLoadError(
                        f"{file}: it is damaged or truncated (header of {header_size} bytes in {size})"
                    )
                add(size.to_bytes(8, "little"))
                add(stream.read(header_size))
                stream.seek(0)
                add(stream.read(_EDGE_BYTES))
                stream.seek(max(0, size - _EDGE_BYTES))
                add(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise ModelLoadError(
            f"{error.filename or path}: cannot be read ({os.strerror(error.errno or 0)})"
        ) from error
    return digest.hexdigest()


def _fill(slot: torch.Tensor, file: Path, name: str, handle: Any) -> None:
    found = tuple(handle.get_slice(name).get_shape())
    if found != tuple(slot.shape):
        raise ModelLoadError(
            f"{file}: tensor {name!r} has shape {list(found)}, but config.json implies {list(slot.shape)}"
        )
    tensor = handle.get_tensor(name)
    if not tensor.is_floating_point():
        raise ModelLoadError(
            f"{file}: tensor {name!r} is {tensor.dtype}; only floating point weights are supported"
        )
    slot.copy_(tensor)


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist; give a complete Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: a JSON object is expected, found {type(value).__name__}")
    return value


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
