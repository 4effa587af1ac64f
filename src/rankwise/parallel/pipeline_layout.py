"""Cuts a model into stages: each runs the model's own forward, in which the blocks of other stages are stood in for.

Why not a chain of blocks: what a model computes around its blocks (positions, masks, a head on the last token) is code, which only its
own forward has. A stage runs it with its own blocks. Those before pass through what comes in, and the last of them gives out what
was received; the first one behind leaves the forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.blocks import Blocks, find_blocks
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model can be cut.

    Attributes:
        blocks: Names, in the order in which they are called.
        before: What has parameters and stands before the blocks: computed by the first stage.
        behind: What stands behind them: computed by the last stage.
        owners: The modules around the blocks, outermost first: the model is "".
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    behind: tuple[str, ...]
    owners: tuple[str, ...]


def find_layout(model: nn.Module, blocks: Blocks = "auto", *, rank: int | None = None) -> Layout:
    """Find the blocks of a model, and what stands before and behind them by the order in which the model holds its modules.

    Args:
        model: The whole.
        blocks: As for ``find_blocks``; of a Sequential "auto" are its layers.
        rank: Ours, for errors.

    Raises:
        UsageError: There are fewer than two.
    """
    is_chain = isinstance(model, nn.Sequential) and isinstance(blocks, str) and blocks == "auto"
    found = (
        [name for name, _ in model.named_children()]
        if is_chain
        else list(find_blocks(model, blocks, rank=rank))
    )
    if len(found) < 2:
        raise UsageError(
            f"this {type(model).__name__} has {len(found)} blocks that a pipeline could be cut between",
            rank=rank,
            hint="name them: blocks='layers.*', blocks=Block, or pass nn.Sequential(...)",
        )
    parents = {""}
    for name in found:
        steps = name.split(".")
        parents |= {".".join(steps[:depth]) for depth in range(1, len(steps))}
    owners = tuple(name for name, _ in model.named_modules() if name in parents)
    before: list[str] = []
    behind: list[str] = []
    is_behind = False
    for name, module in model.named_modules():
        is_behind = is_behind or name in found
        is_outside = name and name not in parents and name not in found and name.rpartition(".")[0] in parents
        if is_outside and next(module.parameters(), None) is not None:
            (behind if is_behind else before).append(name)
    return Layout(tuple(found), tuple(before), tuple(behind), owners)


def list_bounds(names: Sequence[str], num_stages: int, cut: Any, *, rank: int | None = None) -> list[int]:
    """Return with which block each stage begins, and at the end their number.

    Args:
        names: The blocks'.
        num_stages: How many there are to be.
        cut: None: equally many blocks in each. Or the names of the blocks that begin the second stage and those that follow; or how
            many blocks each stage has.
        rank: Ours, for errors.

    Raises:
        UsageError: It can't be cut so.
    """
    if len(names) < num_stages:
        raise UsageError(
            f"{len(names)} blocks can't be cut into {num_stages} stages",
            rank=rank,
            hint="fewer ranks on the pipeline axis, fewer stages_per_rank, or smaller blocks",
        )
    if cut is None:
        return [number * len(names) // num_stages for number in range(num_stages + 1)]
    given = list(cut)
    if given and all(isinstance(one, int) for one in given):
        bounds = [0]
        for one in given:
            bounds.append(bounds[-1] + one)
    else:
        missing = [one for one in given if one not in names]
        if missing:
            raise UsageError(f"cut={given}: there is no block {missing[0]!r}", rank=rank, hint=f"blocks are {', '.join(names[:8])}")  # fmt: skip
        bounds = [0, *(names.index(one) for one in given), len(names)]
    is_fine = len(bounds) == num_stages + 1 and bounds[-1] == len(names) and all(a < b for a, b in pairwise(bounds))  # fmt: skip
    if not is_fine:
        raise UsageError(
            f"cut={given} does not make {num_stages} stages of {len(names)} blocks, each with one at least",
            rank=rank,
            hint=f"name the {num_stages - 1} blocks that begin a stage, in order; or how many blocks each has",
        )
    return bounds


@final
@dataclass(slots=True)
class Turn:
    """What a stage's forward at hand works with.

    Attributes:
        first: Its first block.
        end: The block behind its last one.
        received: What comes from the stage before.
        plan: The shapes of the micro-batch at hand.
        checked: The last plan with which the other inputs of blocks were looked at.
    """

    first: int
    end: int
    received: Tensor | None = None
    plan: Any = None
    checked: Any = None


class _LeftError(BaseException):
    """Leaves the model's forward behind a stage's last block; no Exception, which a forward might catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Elsewhere(nn.Module):  # type: ignore[misc]
    """Stands for a block of another stage."""

    def __init__(self, number: int, turn: Turn | None = None) -> None:
        super().__init__()
        self.number, self._turn = number, turn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass through what comes in; give out what was received; or leave the forward."""
        turn = self._turn
        assert turn is not None  # noqa: S101 - the model itself is not called, its stages are
        hidden = find_hidden((args, kwargs))
        if self.number >= turn.end:
            raise _LeftError(hidden)
        if self.number == turn.first - 1:
            assert turn.received is not None  # noqa: S101 - given before the forward
            self._check_beside(turn, (args, kwargs), hidden)
            hidden = turn.received
        return put_tensors(turn.plan.returned[self.number], [hidden])

    def _check_beside(self, turn: Turn, given: Any, hidden: Tensor) -> None:
        """See, once for each plan, that what else the blocks take was computed without what other stages have."""
        if turn.checked is turn.plan:
            return
        turn.checked = turn.plan
        for path, leaf in flatten(given):
            if isinstance(leaf, Tensor) and leaf is not hidden and leaf.is_floating_point() and bool(leaf.isnan().any()):  # fmt: skip
                raise ModelError(
                    f"block {self.number + 1} takes a second input {path} that is computed from values which another stage has",
                    hint="compute it from the model's inputs alone, or inside of the blocks",
                )


class Blank(nn.Module):  # type: ignore[misc]
    """Stands for what another stage computes before or behind the blocks: gives NaN of its shape, on which nothing may depend."""

    def __init__(self, name: str, turn: Turn | None = None, device: torch.device | None = None) -> None:
        super().__init__()
        self.name, self._turn, self._device = name, turn, device

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return blanks."""
        assert self._turn is not None  # noqa: S101 - as above
        tree, forms = self._turn.plan.outside[self.name]
        return put_tensors(tree, [make_blank(one, self._device) for one in forms])


def make_blank(like: Any, device: torch.device | None) -> Tensor:
    """Return a tensor of NaN, of integers zeros: whatever is computed from it by mistake shows."""
    made = torch.zeros(tuple(like.shape), dtype=like.dtype, device=device)
    return made.fill_(math.nan) if made.is_floating_point() else made


def find_hidden(tree: Any) -> Tensor:
    """Return the first tensor of what a block is given or returns: what flows from block to block."""
    found = next((leaf for _, leaf in flatten(tree) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise UsageError(
            f"a block was called without a tensor, or returned a {type(tree).__name__} without one",
            hint="blocks of a pipeline take the output of the one before",
        )
    return found


@final
class Slot:
    """Where a tensor stands in a tree; no dataclass, which would be taken apart like a container."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Slot({self.number})"


def take_tensors(tree: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a tree with a slot in the place of each tensor, and the tensors."""
    leaves = [leaf for _, leaf in flatten(tree)]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    slots = iter(map(Slot, range(len(tensors))))
    return unflatten(tree, [next(slots) if isinstance(one, Tensor) else one for one in leaves]), tuple(
        tensors
    )


def put_tensors(tree: Any, tensors: Sequence[Any]) -> Any:
    """Return a tree with tensors in its slots."""
    leaves = [leaf for _, leaf in flatten(tree)]
    return unflatten(tree, [tensors[one.number] if isinstance(one, Slot) else one for one in leaves])


@final
class StageModule(nn.Module):  # type: ignore[misc]
    """One stage as a module: its parameters are the stage's, its forward takes what the stage before has sent.

    Args:
        model: The whole model; not changed.
        layout: Where it can be cut.
        first: The first block.
        end: The block behind the last one.
        device: Of this rank.
    """

    def __init__(self, model: nn.Module, layout: Layout, first: int, end: int, device: torch.device) -> None:
        super().__init__()
        self.turn, self.is_first, self.is_last = Turn(first, end), first == 0, end == len(layout.blocks)
        self._pairs: list[Any] = []
        self.shell = self._clone(model, layout, device)
        #: Arguments of the model, for the micro-batch at hand.
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        #: To which floating-point inputs are cast: by FSDP, which does not see them.
        self.dtype: torch.dtype | None = None
        #: What the model has returned, with slots for tensors.
        self.returned: Any = None

    def take(self, plan: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Take the shapes of the micro-batch at hand, and the model's arguments for it."""
        self.turn.plan, self.inputs = plan, call

    def forward(self, *received: Tensor) -> Any:
        """Compute the stage; of the last one return all tensors that the model does."""
        self.turn.received = received[0] if received else None
        for clone, original in self._pairs:
            clone.training = original.training
        args, kwargs = self.inputs if self.dtype is None else _cast(self.inputs, self.dtype)
        try:
            returned = self.shell(*args, **kwargs)
        except _LeftError as left:
            return left.hidden
        finally:
            self.turn.received = None
        self.returned, tensors = take_tensors(returned)
        return tensors[0] if len(tensors) == 1 else tensors

    def _clone(self, model: nn.Module, layout: Layout, device: torch.device) -> nn.Module:
        """Return a copy of the modules around the blocks, which shares with the model all that this stage has."""
        made: dict[str, nn.Module] = {}
        for name in layout.owners:
            original = model.get_submodule(name)
            clone = original.__class__.__new__(original.__class__)
            clone.__dict__ = {**original.__dict__, "_modules": dict(original._modules)}
            if not (self.is_first or self.is_last):
                drop_parameters(clone, device)
            made[name] = clone
            self._pairs.append((clone, original))
            if name:
                parent, _, own = name.rpartition(".")
                made[parent]._modules[own] = clone
        for name, stand_in in self._list_foreign(layout, device):
            parent, _, own = name.rpartition(".")
            made[parent]._modules[own] = stand_in
        return made[""]

    def _list_foreign(self, layout: Layout, device: torch.device) -> Iterator[tuple[str, nn.Module]]:
        for number, name in enumerate(layout.blocks):
            if not self.turn.first <= number < self.turn.end:
                yield name, Elsewhere(number, self.turn)
        for name in layout.before if not self.is_first else ():
            yield name, Blank(name, self.turn, device)
        for name in layout.behind if not self.is_last else ():
            yield name, Blank(name, self.turn, device)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    tree, tensors = take_tensors(tree)
    return put_tensors(tree, [one.to(dtype) if one.is_floating_point() else one for one in tensors])


def drop_parameters(module: nn.Module, device: torch.device) -> None:
    """Put NaN in the place of the parameters that a module around the blocks holds itself: the first and the last stage have them."""
    held = {name: one for name, one in module._parameters.items() if one is not None}
    if not held:
        return
    module._parameters = {name: one for name, one in module._parameters.items() if one is None}
    blanks = {name: make_blank(one, device) for name, one in held.items()}
    module._buffers = {**module._buffers, **blanks}
    module._non_persistent_buffers_set = module._non_persistent_buffers_set | set(blanks)


def prune(model: nn.Module, layout: Layout, stages: Sequence[StageModule], device: torch.device) -> None:
    """Drop from a model, in place, what none of these stages has; the names of what stays are kept."""
    kept = {
        name
        for stage in stages
        for name in (
            *layout.blocks[stage.turn.first : stage.turn.end],
            *(layout.before if stage.is_first else ()),
            *(layout.behind if stage.is_last else ()),
        )
    }
    if not any(stage.is_first or stage.is_last for stage in stages):
        for name in layout.owners:
            drop_parameters(model.get_submodule(name), device)
    for number, name in enumerate(layout.blocks):
        if name not in kept:
            _replace(model, name, Elsewhere(number))
    for name in (*layout.before, *layout.behind):
        if name not in kept:
            _replace(model, name, Blank(name))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
