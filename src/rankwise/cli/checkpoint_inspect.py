"""`rankwise checkpoint inspect`: what a checkpoint says of itself, its parts and its tensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import CheckpointError
from rankwise.base.terminal import clean_text
from rankwise.checkpoint.contents import find_checkpoint, list_parts
from rankwise.checkpoint.folder import read_contents
from rankwise.doctor.units import align, format_bytes, format_count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.checkpoint.contents import PartContents
    from rankwise.checkpoint.manifest import Index, Manifest


def inspect(arguments: argparse.Namespace) -> int:
    """Print one checkpoint; return the exit code."""
    one = find_checkpoint(arguments.path, arguments.step)
    manifest, index = read_contents(one)
    parts = list_parts(index)
    if arguments.part is not None:
        there = sorted({part.name for part in parts})
        parts = [part for part in parts if part.name == arguments.part]
        if not parts:
            raise CheckpointError(f"{one.path} has no part {arguments.part!r}; it has {', '.join(there)}")
    tensors = [_describe_tensor(index, part, name) for part in parts for name in (*part.tensors, *part.arrays)]
    if arguments.format == "json":
        print(json.dumps(_as_json(one.path, manifest, parts, tensors), indent=1))
        return 0
    lines = _format_top(one.path, manifest) if arguments.part is None else []
    lines += _format_parts(parts, index)
    if tensors:
        lines += ["", *_format_tensors(tensors)]
    print(clean_text("\n".join(lines)))
    return 0


def _describe_tensor(index: Index, part: PartContents, name: str) -> dict[str, Any]:
    entry = index.tensors[name]
    return {
        "name": name,
        "part": part.name,
        "rank": part.rank,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "size_bytes": sum(chunk.size for chunk in entry.chunks),
        "num_chunks": len(entry.chunks),
        "files": sorted({chunk.file for chunk in entry.chunks}),
    }


def _as_json(
    path: Path, manifest: Manifest, parts: Sequence[PartContents], tensors: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "path": str(path), "step": manifest.step, "serial": manifest.serial, "saved_at": manifest.saved_at, "ranks": manifest.world_size,
        "mesh": dict(manifest.mesh), "versions": dict(manifest.versions), "metrics": dict(manifest.metrics), "size_bytes": manifest.size,
        "files": [{"name": file.name, "size_bytes": file.size} for file in manifest.files],
        "parts": [{"name": part.name, "rank": part.rank, "kind": part.kind, "num_tensors": len(part.tensors), "others": part.others} for part in parts],
        "tensors": list(tensors),
    }  # fmt: skip


def _format_top(path: Path, manifest: Manifest) -> list[str]:
    mesh = f", mesh {' x '.join(f'{axis} {size}' for axis, size in manifest.mesh.items())}" if manifest.mesh else ""
    rows = [
        ("checkpoint", str(path)),
        ("step", f"{manifest.step} (number {manifest.serial} of its folder)"),
        ("saved", f"{manifest.saved_at} by {format_count(manifest.world_size, 'rank')}{mesh}"),
        ("with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("metrics", ", ".join(f"{name}={value:.6g}" for name, value in manifest.metrics.items())),
        ("files", f"{len(manifest.files)} and the manifest, {format_bytes(manifest.size)}"),
    ]
    return [*align([row for row in rows if row[1]]), ""]


def _format_parts(parts: Sequence[PartContents], index: Index) -> list[str]:
    ranks: dict[str, list[PartContents]] = {}
    for part in parts:
        ranks.setdefault(part.name, []).append(part)
    rows = []
    for name, own in ranks.items():
        kind = own[0].kind if own[0].rank is None else f"{own[0].kind}, of {format_count(len(own), 'rank')}"
        names = [tensor for part in own for tensor in (*part.tensors, *part.arrays)]
        size = sum(chunk.size for tensor in names for chunk in index.tensors[tensor].chunks)
        num_others = sum(len(part.others) for part in own)
        rows.append([name, kind, str(len(names)), str(size), str(num_others)])
    return align([["part", "kind", "tensors", "bytes", "other values"], *rows], right={2, 3, 4})


def _format_tensors(tensors: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [one["name"], one["dtype"], str(one["shape"]), str(one["size_bytes"]), str(one["num_chunks"]), str(len(one["files"]))]
        for one in tensors
    ]  # fmt: skip
    files = {file for one in tensors for file in one["files"]}
    total = [
        "total",
        "",
        format_count(len(tensors), "tensor"),
        *(str(sum(one[key] for one in tensors)) for key in ("size_bytes", "num_chunks")),
        str(len(files)),
    ]
    return align([["tensor", "dtype", "shape", "bytes", "chunks", "files"], *rows, total], right={3, 4, 5})
