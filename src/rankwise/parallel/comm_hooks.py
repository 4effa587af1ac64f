"""Make gradients smaller on their way between the ranks: half precision, or PowerSGD (Vogels et al., arXiv:1905.13727)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

#: DDP makes its buckets anew after the first step, and PowerSGD keeps memory for each bucket.
_FEWEST_PLAIN_STEPS = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Send a low-rank approximation of each gradient, and add what was lost to the next one.

    Attributes:
        rank: Rank of the approximation: 1 to 4, up to 32 for language models. A smaller one sends less and is less exact.
        plain_steps: Steps at the start that send whole gradients, at least 2; a tenth of the training is a good
            start, as early gradients suffer most.
        min_compression: A tensor is compressed only if that makes it this many times smaller.
    """

    rank: int = 1
    plain_steps: int = 1000
    min_compression: float = 2.0


CommHook = Literal["fp16", "bf16", "powersgd"] | PowerSGD


def check_comm_hook(hook: object) -> None:
    """Refuse what is no comm hook."""
    if isinstance(hook, PowerSGD):
        if hook.rank < 1 or hook.plain_steps < _FEWEST_PLAIN_STEPS:
            raise UsageError(
                f"PowerSGD(rank={hook.rank}, plain_steps={hook.plain_steps}): needs a rank of at least 1"
                f" and at least {_FEWEST_PLAIN_STEPS} plain steps"
            )
    elif hook is not None and hook not in ("fp16", "bf16", "powersgd"):
        raise UsageError(
            f"comm_hook={hook!r} is unknown", hint="use 'fp16', 'bf16', 'powersgd', PowerSGD(...) or None"
        )


def register_comm_hook(
    ddp: DistributedDataParallel, hook: CommHook | None, *, group: dist.ProcessGroup, on_nccl: bool
) -> None:
    """Let a wrapped model send its gradients through a hook.

    "fp16" halves what is sent; gradients above 65504 become infinite, so scale the loss or take "bf16", which has the
    range of float32 and 8 bits of precision. Both divide by the number of ranks before they add up.
    """
    check_comm_hook(hook)
    if hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(group, default_hooks.bf16_compress_hook if on_nccl else average_in_bf16)
    elif hook is not None:
        chosen = hook if isinstance(hook, PowerSGD) else PowerSGD()
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=chosen.rank,
            start_powerSGD_iter=chosen.plain_steps,
            min_compression_rate=chosen.min_compression,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def average_in_bf16(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bfloat16, on any backend that adds it up (Gloo does; torch's hook refuses it).

    The rounding: one to 8 bits on each rank, and one for each addition. The division comes first: in full precision it
    costs nothing, and the sum can't overflow.

    Returns:
        What DDP waits for; holds the bucket's own buffer.
    """
    buffer = bucket.buffer()
    small = buffer.div_(group.size()).to(torch.bfloat16)
    future = dist.all_reduce(small, group=group, async_op=True).get_future()

    def widen(done: torch.futures.Future[Any]) -> torch.Tensor:
        widened: torch.Tensor = buffer.copy_(done.value()[0])
        return widened

    averaged: torch.futures.Future[torch.Tensor] = future.then(widen)
    return averaged


# DDP looks at the annotations themselves, and they are strings in this file.
average_in_bf16.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
