"""Weights out of a checkpoint into one safetensors file, and into a model or a checkpoint from a trainer's file of its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from rankwise.base.errors import CheckpointError, UsageError
from rankwise.checkpoint.contents import find_checkpoint, list_parts
from rankwise.checkpoint.disk import REAL_DISK, remove_quietly, tell, write_file
from rankwise.checkpoint.folder import list_checkpoints, read_contents
from rankwise.checkpoint.foreign import read_weights
from rankwise.checkpoint.manifest import Chunk, Index, TensorEntry
from rankwise.checkpoint.parts import clean, match_names, shorten, unwrap
from rankwise.checkpoint.plan import plan_reads
from rankwise.checkpoint.reading import read_tensors
from rankwise.checkpoint.saving import save
from rankwise.checkpoint.shard import DTYPES, Box, make_head
from rankwise.checkpoint.staging import view_bytes
from rankwise.checkpoint.writing import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.checkpoint.contents import PartContents


# ------------------------------------------------------------------ out of a checkpoint


def export_safetensors(path: str | Path, target: str | Path, *, part: str = "model", step: int | None = None) -> Path:
    """Write the tensors of a part as one safetensors file, whatever number of ranks had saved them.

    Checksums are compared on the way, and the file appears when it is complete; an existing one is replaced. One tensor
    at a time is in memory. Names are the part's own, as ``load_state_dict`` wants them: without the part's name, and
    without what wrappers put in. What is not a tensor is left out, with a warning.

    Args:
        path: A checkpoint, or a folder of them.
        target: The file to write.
        part: The part's name.
        step: The step; None: the latest complete one.

    Returns:
        The file.

    Raises:
        CheckpointError: There is no such checkpoint or part, it is damaged, safetensors has no such dtype, or the file
            can't be written.
    """
    one, target = find_checkpoint(path, step), Path(target)
    _, index = read_contents(one)
    contents = _find_part(one.path, list_parts(index), part)
    if target.is_dir():
        raise CheckpointError(f"can't write {target}: it is a folder", hint="give the file's name too")
    if not target.parent.is_dir():
        raise CheckpointError(f"can't write {target}: there is no folder {target.parent}", hint="make it first")
    named = _name_tensors(contents)
    boxes = []
    for name, found in named.items():
        dtype, shape = index.tensors[found].dtype, index.tensors[found].shape
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name} is {dtype}, which safetensors does not support",
                hint="convert it before it is saved, or take it from checkpoint.read()",
            )
        boxes.append(Box(name, dtype, getattr(torch, dtype).itemsize, shape, (0,) * len(shape), shape, is_shard=False))
    if contents.others:
        warn(f"left out of {target}, as they are not tensors: {shorten(contents.others)}")
    # Large elements first, so that each tensor begins where one of its elements may.
    boxes.sort(key=lambda box: (-box.itemsize, box.tensor))
    _write(target, _stream(one.path, index, boxes, named))
    return target


def _find_part(path: Path, parts: Sequence[PartContents], name: str) -> PartContents:
    found = [part for part in parts if part.name == name]
    if not found:
        there = sorted({part.name for part in parts if part.rank is None and part.tensors})
        raise CheckpointError(
            f"{path} has no part {name!r}; with tensors it has {', '.join(there) or 'none'}",
            hint="`rankwise checkpoint inspect` shows what it holds",
        )
    if found[0].rank is not None:
        raise CheckpointError(
            f"each rank has saved its own {name!r} in {path}, and one file can't hold them all",
            hint="checkpoint.read() returns them by rank",
        )
    if not found[0].tensors:
        raise CheckpointError(
            f"part {name!r} of {path} holds no tensors", hint="`rankwise checkpoint inspect` shows what it holds"
        )
    return found[0]


def _name_tensors(part: PartContents) -> dict[str, str]:
    """Return the name in the index for each name in the file."""
    names = [name.removeprefix(part.name).removeprefix(".") or part.name for name in part.tensors]
    # A module was taken out of its wrappers when it was saved: a "module." that is left is its own.
    return dict(zip(_clean_all(names, is_module=part.kind == "module"), part.tensors, strict=True))


def _clean_all(names: Sequence[str], *, is_module: bool = False) -> list[str]:
    """Take wrappers' words out of names, as long as that leaves them different."""
    cleaned = [clean(name) for name in names]
    if not is_module and all(name.startswith("module.") for name in cleaned):
        cleaned = [name.removeprefix("module.") for name in cleaned]
    return cleaned if len(set(cleaned)) == len(names) else list(names)


def _stream(path: Path, index: Index, boxes: Sequence[Box], named: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of the file; each tensor is read when its turn comes."""
    yield make_head(boxes)
    for box in boxes:
        name = named[box.tensor]
        tensor = read_tensors(path, Index({name: index.tensors[name]}, {}, {}))[name]
        yield view_bytes(tensor.flatten().view(torch.uint8) if box.size else tensor.new_empty(0))
        del tensor  # gone before the next one is read


def _write(target: Path, pieces: Iterator[bytes | memoryview]) -> None:
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        write_file(REAL_DISK, temporary, pieces)
        temporary.replace(target)
        REAL_DISK.sync_folder(target.parent)
    except OSError as error:
        raise tell(error, f"can't write {target}") from error
    finally:
        remove_quietly(REAL_DISK, temporary)


# ------------------------------------------------------------------ into a model


def import_weights(
    file: str | Path, model: torch.nn.Module, *, strict: bool = True, key: str | None = None
) -> list[str]:
    """Load the weights of a trainer's own file, ``.pt``, ``.pth`` or ``.safetensors``, into a model.

    They may be all of the file or one entry of a dict in it (``{"model": ..., "epoch": 3}``), and may carry the names
    of wrappers (``module.``, ``_orig_mod.``). The model may be wrapped too; of a sharded one each rank takes its shard.
    Nothing in the file is executed.

    Args:
        file: The file, which each rank reads; no rank waits for another. Or a folder of transformers:
            ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        model: The model, on its device.
        strict: Whether names and shapes that don't fit are an error; else those weights stay as they are.
        key: Where in the file the weights are, ``"ema"`` or ``"nets.generator"``; None: find them.

    Returns:
        What did not fit, a line each; empty if all did.

    Raises:
        CheckpointError: The file can't be read without executing code in it, it is not clear which weights are meant,
            or they don't fit.
    """
    module = unwrap(model)
    weights = read_weights(file, key=key)
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    matched = match_names(list(own), list(weights))
    wrong_shapes = {
        name: f"{name} has shape {list(own[name].shape)} in the model and {list(weights[found].shape)} in the file"
        for name, found in matched.items()
        if not is_lazy(own[name]) and own[name].shape != weights[found].shape
    }
    problems = _compare_names(module, own, weights, matched) + list(wrong_shapes.values())
    if strict and problems:
        raise CheckpointError(
            f"{file} does not fit the model: {shorten(problems, '; ')}",
            hint="build the model with the sizes that the file was saved with; strict=False loads what fits",
        )
    fitting = {name: found for name, found in matched.items() if name not in wrong_shapes}
    if not fitting:
        raise CheckpointError(
            f"nothing in {file} fits the model: {shorten(problems, '; ')}", hint="is it the file of another model?"
        )
    module.load_state_dict(_place({name: weights[found] for name, found in fitting.items()}, own), strict=False)
    return problems


def _compare_names(
    module: torch.nn.Module,
    own: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    matched: Mapping[str, str],
) -> list[str]:
    # Files may hold only one name of a tensor that has two: it is there by the other.
    tied = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    loaded = {tied[name] for name in matched if name in tied}
    missing = [name for name in own if name not in matched and tied.get(name) not in loaded]
    unknown = sorted(weights.keys() - set(matched.values()))
    text = [f"the file lacks {shorten(missing)}"] if missing else []
    return text + ([f"the model lacks {shorten(unknown)}"] if unknown else [])


def _place(values: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what ``load_state_dict`` is to be given; of a sharded tensor the shard is filled already, and it is given that."""
    for name in values:
        if own[name].device.type == "meta":
            raise CheckpointError(
                f"{name} is on the meta device and has no memory to load into",
                hint="call model.to_empty(device=...) first",
            )
    # Not by distribute_tensor: it would put each whole tensor onto the device.
    sharded = {name: own[name] for name in values if isinstance(own[name], DTensor)}
    entries = {
        name: TensorEntry(str(value.dtype).removeprefix("torch."), tuple(value.shape), (Chunk("", 0, value.nbytes, 0, (0,) * value.ndim, tuple(value.shape)),))
        for name, value in values.items()
        if name in sharded
    }  # fmt: skip
    reads = plan_reads(sharded, Index(entries, {}, {}))
    for (name, _), pieces in reads.by_chunk.items():
        for piece in pieces:
            reads.deliver(piece, values[name])
    return {**values, **sharded}


# ------------------------------------------------------------------ into a checkpoint


def import_file(file: str | Path, folder: str | Path, *, step: int = 0, key: str | None = None) -> Path:
    """Make a checkpoint of the weights in a trainer's own file: ``load(folder, {"model": model})`` then takes them.

    Args:
        file: As for ``import_weights``.
        folder: A folder without checkpoints, made if it is not there.
        step: The step that training goes on from.
        key: As for ``import_weights``.

    Returns:
        The checkpoint.

    Raises:
        UsageError: The folder has checkpoints: the new one would become their latest.
        CheckpointError: The file can't be read, or the folder not be written.
    """
    there = list_checkpoints(folder)
    if there:
        raise UsageError(
            f"{folder} has checkpoints already, the latest of step {there[0].step}: a job that resumes there would load the weights of {file} instead",
            hint="pass a new folder",
        )
    weights = read_weights(file, key=key)
    named = dict(zip(_clean_all(list(weights)), weights.values(), strict=True))
    return save(folder, {"model": named}, step=step, rng=False).wait()
