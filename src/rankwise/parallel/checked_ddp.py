"""A DistributedDataParallel whose errors name parameters, and which notices when these are changed after the wrap."""

from __future__ import annotations

import inspect
import re
from typing import Any, final

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import CollectiveError, ModelError
from rankwise.parallel.names import quote
from rankwise.runtime.signature import naming

#: Forwards between two looks at the parameters; the first is after every ``train()`` or ``eval()``, as such changes
#: are made between epochs.
_FORWARDS_BETWEEN_CHECKS = 100
_MOST_NAMED = 8
# What reducer.cpp says (torch 2.8 to 2.13), whose indices count the parameters with requires_grad.
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")


@final
class Watch:
    """What a wrapped model remembers of itself: its parameters, as they were when it was wrapped.

    Attributes:
        has_synced_batchnorm: Whether each forward in training is a collective.
        num_left_unsynced: Micro-batches of an accumulation that was left early.
    """

    def __init__(self, ddp: DistributedDataParallel, *, rank: int, has_synced_batchnorm: bool) -> None:
        self.rank, self.has_synced_batchnorm = rank, has_synced_batchnorm
        self.ignored = set(ddp.parameters_to_ignore)
        named = [pair for pair in ddp.module.named_parameters() if pair[0] not in self.ignored]
        self.parameters = [(name, each, each.requires_grad) for name, each in named]
        self.listed = [each for _, each in named]
        #: Names of the parameters that DDP averages, in its order.
        self.trained = [name for name, each in named if each.requires_grad]
        self.seen_trained = [each.requires_grad for each in self.listed]
        #: Forwards until the parameters are looked at again.
        self.forwards_left = 0
        self.num_left_unsynced = 0


class WrappedError(ModelError, AttributeError):
    """An attribute of the model is asked of what wraps it. An AttributeError, as in torch: ``hasattr`` is False."""


@final
class CheckedDDP(DistributedDataParallel):  # type: ignore[misc]
    """torch's DistributedDataParallel; made by ``apply_ddp``, which sets ``watch``."""

    watch: Watch
    require_forward_param_sync: bool  # torch's: whether the next forward shares the buffers

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            ModelError: Parameters had no part in the last loss, or were changed since the model was wrapped.
            CollectiveError: The last accumulation was left before its gradients were averaged; or a peer has left.

        Collective: in training mode all ranks, if the model has buffers or synced BatchNorm; the backward in any case.
        """
        check_before_forward(self)
        # Buffers are shared in training only, so that one rank may evaluate alone: in evaluation they don't change.
        hides = not self.training and self.require_forward_param_sync
        if hides:
            self.require_forward_param_sync = False
        try:
            with naming(self.watch.rank, "the forward of the wrapped model"):
                return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            named = _name_unused(error, self)
            if named is None:
                raise
            raise named from error
        finally:
            if hides:
                self.require_forward_param_sync = True

    def __getattr__(self, name: str) -> Any:
        """As in torch; what the model inside has is named, and how it is used from here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not _holds(self.__dict__.get("_modules", {}).get("module"), name):
                raise
        raise WrappedError(
            f"{name!r} is an attribute of the model inside DistributedDataParallel, which averages gradients for its forward() alone",
            hint=f"train by model(...), with the rest in forward() or in the loss; without gradients, model.module.{name} (trainer.model.{name})",
        )

    def train(self, mode: bool = True) -> CheckedDDP:  # noqa: FBT001 - torch's signature
        """Set training mode, as in torch; the next forward looks at the parameters."""
        self.watch.forwards_left = 0
        super().train(mode)
        return self


def check_before_forward(ddp: CheckedDDP) -> None:
    """See, before a forward with gradients, that the model is still what was wrapped.

    Raises:
        ModelError: Parameters were changed since then.
        CollectiveError: The last accumulation was left before its gradients were averaged.
    """
    if not torch.is_grad_enabled():
        return
    watch = ddp.watch
    watch.forwards_left -= 1
    if watch.forwards_left < 0 or [each.requires_grad for each in watch.listed] != watch.seen_trained:
        _check_parameters(ddp, watch)
    if watch.num_left_unsynced:
        _check_unsynced(watch)


def _check_parameters(ddp: DistributedDataParallel, watch: Watch) -> None:
    """Refuse to continue with parameters that DDP does not know: their gradients would stay on each rank, silently."""
    watch.forwards_left = _FORWARDS_BETWEEN_CHECKS
    watch.seen_trained = [each.requires_grad for each in watch.listed]
    melted = [name for name, each, trained in watch.parameters if each.requires_grad and not trained]
    frozen = [name for name, each, trained in watch.parameters if trained and not each.requires_grad]
    if len(frozen) == len(watch.trained) or ddp.find_unused_parameters or not ddp.training:
        # Frozen as a whole for a while, as in adversarial training, or in evaluation: there is no backward to wait for.
        # With find_unused_parameters, DDP finds that they are not used.
        frozen = []
    known = {id(each) for each in watch.listed}
    new = [
        name
        for name, each in ddp.module.named_parameters()
        if id(each) not in known and each.requires_grad and name not in watch.ignored
    ]
    if not (melted or frozen or new):
        return
    lines = [
        f"{_quote_be(names)} {what}"
        for names, what in (
            (melted, "unfrozen: the gradients would never be averaged"),
            (frozen, "frozen: the averaging would wait for the gradients"),
            (new, "added to the model: the gradients would never be averaged"),
        )
        if names
    ]
    raise ModelError(
        f"parameters were changed after apply_ddp: {'; '.join(lines)}",
        rank=watch.rank,
        hint="wrap again after the change, on every rank: `ddp = apply_ddp(ddp.module, ...)`",
    )


def _name_unused(error: RuntimeError, ddp: CheckedDDP) -> ModelError | None:
    text = str(error)
    found = _INDICES.search(text) if _UNFINISHED in text else None
    if found is None:
        return None
    indices = [int(index) for index in found[1].split()]
    trained = ddp.watch.trained
    if max(indices) >= len(trained):
        return None
    names = [trained[index] for index in indices]
    if ddp.static_graph:
        return ModelError(
            f"{_quote_be(names)} not used in this loss but in the first one, and static_graph=True promises that nothing changes",
            rank=ddp.watch.rank,
            hint="leave static_graph out; with a branch that some steps don't take, set find_unused_parameters=True",
        )
    if ddp.find_unused_parameters:
        hint = (
            "find_unused_parameters=True sees only tensors in tuples, lists, dicts and dataclasses: return the outputs in these, and add"
            " all to the loss"
        )
    else:
        hint = "remove or freeze what is never used; add outputs that are left out to the loss; or, if a branch is taken only sometimes, apply_ddp(..., find_unused_parameters=True)"
    return ModelError(
        f"{_quote_be(names)} not used in the last loss: without a gradient the ranks' average never ended",
        rank=ddp.watch.rank,
        hint=hint,
    )


def _quote_be(names: list[str]) -> str:
    return f"{quote(names, _MOST_NAMED)} {'was' if len(names) == 1 else 'were'}"


def _check_unsynced(watch: Watch) -> None:
    """Refuse to continue with gradients of an accumulation that was left early; a step that was dropped leaves none."""
    number, watch.num_left_unsynced = watch.num_left_unsynced, 0
    if not any(each.grad is not None and bool(each.grad.any()) for each in watch.listed):
        return
    raise CollectiveError(
        f"the last accumulation was left after {number} micro-batch(es), before its gradients were averaged over the ranks",
        rank=watch.rank,
        hint="let `for micro in accumulate(...)` run to its end, or drop the step with optimizer.zero_grad(), on every rank",
    )


def _holds(model: Any, name: str) -> bool:
    """Whether a module has an attribute; none of its properties is run for that."""
    kept = vars(model) if model is not None else {}
    inside = any(name in kept.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    return inside or inspect.getattr_static(model, name, None) is not None
