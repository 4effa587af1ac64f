"""What is in a checkpoint, looked up without torch: which one is meant, its parts, their tensors and what else they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.folder import list_checkpoints, open_checkpoint
from rankwise.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from rankwise.checkpoint.folder import Checkpoint
    from rankwise.checkpoint.manifest import Index


@final
@dataclass(slots=True)
class PartContents:
    """What a part of a checkpoint holds.

    Attributes:
        name: Of the part.
        rank: Whose it is, where each rank has saved its own; None if it is everyone's.
        kind: ``module``, ``optimizer``, ``stateful`` or ``value``.
        tensors: Names of its tensors, as the index has them.
        arrays: Names of the bytes of NumPy's arrays, which lie beside the tensors.
        others: Places in it that hold something else: numbers, texts, arrays.
    """

    name: str
    rank: int | None
    kind: str
    tensors: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def find_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint that is meant, with its manifest read.

    Args:
        path: A checkpoint, or a folder of them.
        step: The step that is wanted; None: the latest complete one.

    Raises:
        CheckpointError: It is not there, or can't be loaded; says why.
    """
    path = Path(path)
    found = list_checkpoints(path) if path.is_dir() and not (path / MANIFEST).exists() else []
    if not found:
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a folder" if path.exists() else f"there is no folder {path}",
                hint="pass the folder that was passed to save(), or one checkpoint in it",
            )
        # A name like a checkpoint's, and no manifest: that is what is wrong with it, and not that it is no checkpoint.
        found = [open_checkpoint(path)] if (path / MANIFEST).exists() or path.name.startswith("step-") else []
    wanted = [one for one in found if step is None or one.step == step]
    whole = [one for one in wanted if one.problem is None]
    if whole:
        return whole[0]
    if wanted:
        raise CheckpointError(f"{wanted[0].problem}", hint="`rankwise checkpoint ls` shows which ones are complete")
    steps = ", ".join(str(one.step) for one in found) or "none"
    raise CheckpointError(
        f"{path} holds no checkpoint" + ("" if step is None else f" of step {step}; it has {steps}"),
        hint="pass the folder that was passed to save(), or one checkpoint in it",
    )


def list_unfinished(folder: str | Path) -> list[Path]:
    """Return what is in a folder of checkpoints and is no checkpoint yet: being written, or left by a job that died."""
    return sorted(Path(folder).glob("step-*.tmp-*"))


def list_parts(index: Index) -> list[PartContents]:
    """Return the parts of a checkpoint, those of all ranks first."""
    found = []
    for rank, trees in [(None, index.trees), *sorted(index.rank_trees.items())]:
        for name, tree in trees.items():
            kind, held = next(iter(tree.items()))
            found.append(PartContents(name, rank, kind))
            _walk(held, (), found[-1])
    return found


def _walk(held: Any, place: tuple[str, ...], part: PartContents) -> None:
    """Go through an encoded state (tree.py says how, and puts before some containers' items how these are made) and note what stands where."""
    if isinstance(held, list):
        for number, one in enumerate(held):
            _walk(one, (*place, str(number)), part)
    elif not isinstance(held, dict):
        part.others.append(".".join(place))
    elif len(held) != 1 or not next(iter(held)).startswith("$"):
        for key, one in held.items():
            _walk(one, (*place, key), part)
    else:
        _walk_tag(*next(iter(held.items())), place, part)


def _walk_tag(tag: str, held: Any, place: tuple[str, ...], part: PartContents) -> None:
    if tag == "$tensor":
        part.tensors.append(held)
    elif tag == "$dict":
        for key, one in held:
            _walk(one, (*place, str(key)), part)
    elif tag in {"$tuple", "$set", "$frozenset", "$counter", "$deque", "$defaultdict"}:
        _walk(held[1] if tag in {"$deque", "$defaultdict"} else held, place, part)
    else:
        part.others.append(".".join(place))
        if tag == "$numpy":
            part.arrays.append(held[3])
