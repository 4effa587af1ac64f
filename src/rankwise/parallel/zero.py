"""Cut an optimizer's states over the ranks, while each holds the whole model (ZeRO stage 1: Rajbhandari et al., arXiv:1910.02054)."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.tensor import DTensor

from rankwise.base.errors import UsageError
from rankwise.parallel.dtensors import share_states
from rankwise.runtime.context import RankContext, current

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer


@final
class ShardedOptimizer(ZeroRedundancyOptimizer):  # type: ignore[misc]
    """torch's ZeroRedundancyOptimizer, whose state a checkpoint takes without bringing it together; made by ``apply_zero1``."""

    ctx: RankContext

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the state of a parameter, and moves it."""
        return bool(self._param_to_rank[parameter] == self.rank)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the state by the numbers of all parameters; where another rank has a tensor, one on the meta device stands for it.

        Collective: every rank.
        """
        own = {self._param_to_index[one]: state for one, state in self.optim.state.items()}
        what = "taking apart an optimizer whose states are sharded"
        state, _ = share_states(own, None, self.ctx.control, what=what)
        groups = torch.optim.Optimizer.state_dict(self)["param_groups"]
        return {"state": dict(sorted(state.items())), "param_groups": groups}


def apply_zero1(optimizer: Optimizer, *, ctx: RankContext | None = None) -> ShardedOptimizer:
    """Shard an optimizer's states over the ranks: each keeps those of some parameters, updates these, and sends them to the others.

    Adam's two states take twice the memory of the weights; afterwards a rank has its share of that. The weights are
    those of the optimizer itself, to the bit. The model is one of ``apply_ddp``::

        model = rankwise.apply_ddp(Net())
        optimizer = rankwise.apply_zero1(torch.optim.AdamW(model.parameters(), lr=1e-3))

    Args:
        optimizer: Any that goes through its parameters one by one, before its first step. Don't use it any more: use
            what is returned.
        ctx: The job; None: the one that ``init()`` joined.

    Returns:
        torch's ZeroRedundancyOptimizer. Checkpoints save and load it like any other, at any number of ranks; schedulers
        are built over it.

    Raises:
        UsageError: It has made steps, a scheduler moves it, or its parameters are sharded.
        CollectiveError: The ranks hold different ones.

    Collective: every rank. From now on, ``step()`` and ``checkpoint.save`` are, too.
    """
    ctx = ctx or current()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    problem = _find_problem(optimizer, parameters)
    if problem is not None:
        raise UsageError(problem[0], rank=ctx.rank, hint=problem[1])
    ctx.agree(
        [type(optimizer).__qualname__, [[tuple(one.shape) for one in group["params"]] for group in optimizer.param_groups]],
        "the optimizer that apply_zero1 cuts",
    )  # fmt: skip
    taken = inspect.signature(type(optimizer)).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    defaults = {name: value for name, value in optimizer.defaults.items() if takes_all or name in taken}
    made = ShardedOptimizer(
        optimizer.param_groups,
        type(optimizer),
        process_group=ctx.group,
        parameters_as_bucket_view=True,
        **defaults,
    )
    made.ctx = ctx
    return made


def _find_problem(optimizer: Optimizer, parameters: list[torch.Tensor]) -> tuple[str, str] | None:
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        # LBFGS: its step is one for all parameters together, and each rank would make another.
        return (
            f"{kind} looks at all parameters at once, and each rank would have some of them",
            "leave apply_zero1 out",
        )
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return f"apply_zero1 was given a {kind}, whose states are sharded already", "call it once"
    # Adagrad has states from the start.
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):
        return (
            f"this {kind} has made steps, and its states are not sharded",
            "call apply_zero1 before the first step, and load a checkpoint afterwards",
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        return (
            f"a scheduler was built over this {kind}, and would not move what apply_zero1 returns",
            "build the scheduler afterwards",
        )
    if any(isinstance(one, DTensor) for one in parameters):
        return (
            f"the parameters of this {kind} are sharded, and so are its states",
            "leave apply_zero1 out: it is for apply_ddp",
        )
    kinds = sorted({f"{str(one.dtype).removeprefix('torch.')} on {one.device}" for one in parameters})
    problem = (
        f"apply_zero1 takes parameters of one dtype and device, and these are {', '.join(kinds)}",
        "use apply_fsdp, or one dtype",
    )
    return problem if len(kinds) > 1 else None
