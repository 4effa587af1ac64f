"""Weights out of files that other programs wrote: torch.save's and safetensors, without executing anything in them."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.disk import tell
from rankwise.checkpoint.shard import DTYPES

#: What trainers written by hand call the model's weights in their files.
KNOWN_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "net",
    "network",
    "module",
    "weights",
    "params",
    "ema",
    "model_ema",
    "state_dict_ema",
)
#: Weights lie on top or one below: deeper dicts of tensors are an optimizer's.
_DEEPEST = 2
_INDEX = ".index.json"
_MOST_SHOWN = 8
_TORCH_DTYPES = {known: getattr(torch, name) for name, known in DTYPES.items()}
_LONGEST_HEAD = 100_000_000  # safetensors' own limit


def read_weights(file: str | Path, *, key: str | None = None) -> dict[str, torch.Tensor]:
    """Return the weights in a ``.pt``, ``.pth`` or ``.safetensors`` file, on the CPU and, where the file allows, mapped.

    Args:
        file: The file; or a folder of transformers, which has one such file, or several and an index.
        key: Where in the file they are, ``"ema"`` or ``"nets.generator"``; None: find them.

    Raises:
        CheckpointError: The file can't be read without executing code in it, or it is not clear which weights are
            meant.
    """
    file = Path(file)
    if file.is_dir():
        file = _find_file(file)
    try:
        if file.name.endswith(_INDEX):
            return find_weights(_read_several(file), str(file), key)
        with file.open("rb"):
            pass
        content = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    except OSError as error:
        raise tell(error, f"can't read {file}") from error
    return find_weights(content, str(file), key)


def _find_file(folder: Path) -> Path:
    """Return the file of a folder that transformers has written."""
    stems = ("model.safetensors", "pytorch_model.bin")
    there = [one for stem in stems for one in (folder / stem, folder / f"{stem}{_INDEX}") if one.exists()]
    if not there:
        raise CheckpointError(
            f"{folder} is a folder, and has no {' or '.join(stems)}",
            hint="pass a .pt, .pth or .safetensors file; checkpoints of rankwise are read by checkpoint.load()",
        )
    return there[0]


def _read_several(index: Path) -> dict[str, torch.Tensor]:
    """Read the files that an index of transformers names, and see that each tensor is in its file."""
    try:
        file_of = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weights: {error!r}", hint='it must hold {"weight_map": {name: file}}'
        ) from error
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(file_of.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names a file {name!r} elsewhere", hint="all files of a model must be beside its index"
            )
        found |= read_weights(index.with_name(name))
    lacking = [f"{name} (of {file})" for name, file in file_of.items() if name not in found]
    if lacking:
        raise CheckpointError(
            f"{index} names tensors that its files lack: {', '.join(lacking[:_MOST_SHOWN])}",
            hint="a download was cut short: download the folder again",
        )
    return {name: found[name] for name in file_of}


def _read_torch(file: Path) -> Any:
    # Mapped files cost no memory until a tensor is used; the format before torch 1.6 can't be.
    can_map = zipfile.is_zipfile(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=can_map)
    except OSError:
        raise
    except Exception as error:  # what torch raises for bytes that are no pickle depends on the bytes
        reason = _find_reason(error)
        if re.search(r"\b(global|class|function|instantiate|TorchScript)", reason, re.IGNORECASE):
            raise CheckpointError(
                f"{file} holds more than tensors and plain values, and loading it would execute code in it: {reason}",
                hint="where it was made, save the weights alone: torch.save(model.state_dict(), 'weights.pt')",
            ) from error
        raise CheckpointError(
            f"{file} can't be read by torch.load: {reason}", hint="it is cut off, damaged, or not a file of torch.save"
        ) from error


def _find_reason(error: Exception) -> str:
    """Take what matters out of torch's long text."""
    text = str(error)
    if isinstance(error, LookupError) or not text.strip():
        return f"its bytes are invalid ({type(error).__name__})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((line for line in lines if "WeightsUnpickler error" in line), lines[0])
    return line.removeprefix("WeightsUnpickler error: ").partition(". ")[0]


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """Map a file's tensors (https://github.com/huggingface/safetensors#format)."""
    size = file.stat().st_size
    with file.open("rb") as source:
        head_size = int.from_bytes(source.read(8), "little")
        if size < 8 or head_size > min(size - 8, _LONGEST_HEAD):
            raise CheckpointError(
                f"{file} is not a safetensors file: it has {size} bytes, and its head {head_size}",
                hint="it is cut off, or something else with this name",
            )
        head = source.read(head_size)
    data = torch.empty(0, dtype=torch.uint8)
    if size > 8 + head_size:
        data = data.set_(torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size))[8 + head_size :]
    try:
        entries = {name: entry for name, entry in json.loads(head).items() if name != "__metadata__"}
        return {name: _cut_out(data, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the head of {file} is damaged: {error!r}", hint="get another copy of it") from error


def _cut_out(data: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, (start, end) = _TORCH_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not 0 <= start <= end <= data.numel() or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"bytes {start} to {end} of {data.numel()} for {entry['dtype']} {shape}")
    piece = data[start:end]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()  # not where an element may begin
    return piece.view(dtype).view(shape) if end > start else torch.empty(shape, dtype=dtype)


# ------------------------------------------------------------------ finding


def find_weights(content: Any, file: str, key: str | None = None) -> dict[str, torch.Tensor]:
    """Return the state dict in what a file held.

    Args:
        content: What the file held.
        file: Its name, for errors.
        key: Where in it; None: find it.

    Raises:
        CheckpointError: There is none, there are several, or ``key`` leads to something else.
    """
    found = dict(_search(content, ()))
    if key is not None:
        if key not in found:
            raise CheckpointError(
                f"{file} has no weights under {key!r}; it has {_describe(found, content)}",
                hint="parts of a key are joined by dots",
            )
        return found[key]
    if "" in found:
        return found[""]
    known = [path for path in found if path.split(".")[0] in KNOWN_KEYS]
    chosen = known or list(found)
    if len(chosen) == 1:
        return found[chosen[0]]
    if not found:
        raise CheckpointError(
            f"{file} holds no weights: it is {_describe(found, content)}",
            hint="expected a file of torch.save(model.state_dict(), ...), or of a dict that contains one",
        )
    raise CheckpointError(
        f"{file} holds several sets of weights: {_describe(found, content)}",
        hint=f"pass one: key={chosen[0]!r}, or --key {chosen[0]}",
    )


def _search(content: Any, path: tuple[str, ...]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return
    # Modules may add what is no tensor (get_extra_state): weights they are all the same.
    weights = {name: value for name, value in content.items() if not name.endswith("_extra_state")}
    if weights and all(isinstance(value, torch.Tensor) for value in weights.values()):
        yield ".".join(path), weights
    elif len(path) < _DEEPEST and "param_groups" not in content:
        for name, value in content.items():
            yield from _search(value, (*path, name))


def _describe(found: Mapping[str, Mapping[str, Any]], content: Any) -> str:
    if found:
        lines = [f"{path or 'the file itself'} ({len(weights)} tensors)" for path, weights in found.items()]
    elif isinstance(content, Mapping):
        lines = [f"{name} ({type(value).__name__})" for name, value in content.items()] or ["an empty dict"]
    else:
        lines = [f"a {type(content).__qualname__}"]
    more = f" and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return ", ".join(lines[:_MOST_SHOWN]) + more
