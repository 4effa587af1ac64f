"""Parameters that are made under ``strategy.scope()``: equal on all replicas at first, and moved by the sum of all gradients afterwards.

A hook of torch before each ``optimizer.step()`` finds whose parameters are about to be moved.
"""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from rankwise.base.errors import UsageError
from rankwise.parallel.ddp import is_averaged
from rankwise.runtime.collectives import all_reduce_, broadcast_
from rankwise.tf.contexts import find_replica

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from rankwise.tf.contexts import Owner

#: Whose each parameter is: a weak reference to the strategy.
_owners = WeakTensorKeyDictionary()


@final
class Noted:
    """What was made under a scope: parameters and buffers by name, in their order; the modules around them, and optimizers."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self._children: set[int] = set()

    def note(self, module: nn.Module, name: str, made: Tensor | nn.Module | None) -> None:
        """Keep what a module was given."""
        if all(one is not module for one in self.modules):
            self.modules.append(module)
        if isinstance(made, nn.Module):
            self._children.add(id(made))
        elif made is not None:
            self.tensors[f"{len(self.tensors)} {type(module).__name__}.{name}"] = made

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that are part of no other."""
        return [one for one in self.modules if id(one) not in self._children]


@contextmanager
def noting(strategy: Owner) -> Iterator[Noted]:
    """Keep what modules and optimizers are made in the block."""
    noted, start = Noted(), Optimizer.__init__

    def note_optimizer(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        noted.optimizers.append(self)

    handles = [
        hooks.register_module_parameter_registration_hook(noted.note),
        hooks.register_module_buffer_registration_hook(noted.note),
        hooks.register_module_module_registration_hook(noted.note),
    ]
    Optimizer.__init__ = note_optimizer
    try:
        yield noted
    finally:
        Optimizer.__init__ = start
        for handle in handles:
            handle.remove()
    for tensor in noted.tensors.values():
        _owners[tensor] = weakref.ref(strategy)


@cache
def listen() -> None:
    """Have each ``optimizer.step()`` looked at, from the first strategy on: a script without any scope is the one that needs it most."""
    register_optimizer_step_pre_hook(optimizer_step)
    register_optimizer_step_post_hook(_end_step)


def make_equal(noted: Noted, rank: int) -> None:
    """Give all replicas the values of the first; see ``Strategy.scope`` for what it raises.

    Collective: every rank.
    """
    refuse_lazy(noted, rank)
    if noted.tensors:
        made = {name: one.detach() for name, one in noted.tensors.items()}
        broadcast_(made, name="what strategy.scope() has made")


def refuse_lazy(noted: Noted, rank: int) -> None:
    """Refuse parameters without values."""
    lazy = next((name for name, one in noted.tensors.items() if is_lazy(one)), None)
    if lazy is not None:
        raise UsageError(
            f"{lazy.split(' ', 1)[1]} has no shape at the end of strategy.scope()", rank=rank,
            hint="call the model once under the scope, with a batch of zeros, so that its lazy layers have values",
        )  # fmt: skip


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Add gradients over the replicas; one that only some have counts as zeros elsewhere, and one that nobody has stays None.

    Collective: every replica, for the same parameters.
    """
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        return
    rows = [_list_rows(one.grad) for one in trained]
    flags = [[one.grad is not None for one in trained], [one is not None for one in rows]]
    has = torch.tensor(flags, dtype=torch.float32, device=trained[0].device)
    for one in trained:
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad.to_dense()
    all_reduce_([has, [one.grad for one in trained]], name="the gradients of optimizer.step()")
    present, sparse = has.tolist()
    # As in one process: the sum with a dense one is dense.
    _make_sparse(
        [(one, own) for one, own, n, all_ in zip(trained, rows, sparse, present, strict=True) if 0 < n == all_]
    )
    for one, number in zip(trained, present, strict=True):
        if not number:
            one.grad = None


def _list_rows(gradient: Tensor | None) -> Tensor | None:
    """Return which rows a sparse gradient has, that of ``nn.Embedding(sparse=True)``: others on each replica."""
    return gradient.coalesce().indices()[0] if gradient is not None and gradient.is_sparse else None


def _make_sparse(tables: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Keep of gradients the rows that any replica has: optimizers move them even by zeros."""
    used = [torch.zeros(len(one), device=one.device) for one, _ in tables]
    for mask, (_, rows) in zip(used, tables, strict=True):
        if rows is not None:
            mask[rows] = 1
    if used:
        all_reduce_(used, name="the rows of sparse gradients")
    for mask, (one, _) in zip(used, tables, strict=True):
        gradient: Any = one.grad
        rows = mask.nonzero()[:, 0]
        one.grad = torch.sparse_coo_tensor(rows[None], gradient[rows], one.shape, is_coalesced=True)


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer moves."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def find_owner(tensor: Tensor) -> Owner | None:
    """Return the strategy under whose scope a parameter was made."""
    found = _owners.get(tensor)
    return None if found is None else found()


def optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """See that somebody adds the gradients of what is about to move; reports call the wait for others by this function's name."""
    parameters = list_parameters(optimizer)
    replica = find_replica()
    running = None if replica is None else replica.strategy
    owners = {id(one): one for one in map(find_owner, parameters)}
    if running is None:
        owner = next((one for one in owners.values() if one is not None), None)
        if owner is not None and owner.num_replicas_in_sync > 1 and not is_averaged(parameters):
            raise UsageError(
                f"optimizer.step() outside of strategy.run(): nothing adds the gradients of the {owner.num_replicas_in_sync} replicas", rank=owner.rank,
                hint="forward, backward and step belong in the function that strategy.run() is given; or give model and optimizer to a Trainer",
            )  # fmt: skip
        return
    if replica is not None:
        # A step that has raised an error is still noted, and no frame of it is there any more.
        frames = set(_list_frames())
        replica.stepping = [one for one in replica.stepping if one[0] in frames]
        summed = set().union(*(ids for _, ids in replica.stepping))
        parameters = [one for one in parameters if id(one) not in summed]
        if replica.stepping and not parameters:
            return  # the optimizer inside of a wrapper, whose step has added the gradients
    if running.num_replicas_in_sync > 1 and is_averaged(parameters):
        raise UsageError(
            "the gradients of this model are averaged by apply_ddp, and strategy.run() adds gradients", rank=running.rank,
            hint="leave out apply_ddp, or run the step without strategy.run()",
        )  # fmt: skip
    if any(owner is not running for owner in owners.values()):
        _refuse_strangers(parameters, running)
        return
    # After the optimizer itself.
    closure = next(iter(args[1:]), kwargs.get("closure"))
    if closure is not None and running.is_spread:
        raise UsageError(
            "optimizer.step(closure) in strategy.run(): nothing adds the gradients that the closure computes", rank=running.rank,
            hint="compute loss and gradients first, then optimizer.step(); LBFGS, which needs a closure, is for one replica",
        )  # fmt: skip
    running.updates.before_step(optimizer, parameters)
    if replica is not None:
        replica.stepping.append((sys._getframe(1), set(map(id, parameters))))


def _end_step(*_: Any) -> None:
    replica = find_replica()
    if replica is not None:
        frame = sys._getframe(1)  # the one that has called the hook before the step
        replica.stepping = [one for one in replica.stepping if one[0] is not frame]


def _list_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _refuse_strangers(parameters: Sequence[Tensor], running: Owner) -> None:
    if not running.is_spread:
        return
    strangers = [one for one in parameters if find_owner(one) is not running]
    raise UsageError(
        f"optimizer.step() in strategy.run(): {len(strangers)} of {len(parameters)} parameters were not made under this strategy's scope, "
        f"the first is {_find_name(strangers[0])} of shape {tuple(strangers[0].shape)}: each replica would train its own",
        rank=running.rank, hint="with strategy.scope(): model = ...; what replaces parameters, as load_state_dict(assign=True) does, belongs there as well",
    )  # fmt: skip


def _find_name(parameter: Tensor) -> str:
    """Return module and name of a parameter.

    An optimizer doesn't know them: all modules of the process are searched, for an error only.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    found = [
        f"{type(one).__name__}.{name}"
        for one in modules
        for name, held in vars(one).get("_parameters", {}).items()
        if held is parameter
    ]
    return found[0] if found else "one of no module"
