"""Several ranks with tensors on GPUs: all on one GPU by Gloo (``gloo``), or each on its own by NCCL (``nccl``)."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from checks import DEVICE, IS_CUDA, NUM_SAMPLES, build_model, check, draw, measure_difference, note, train
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rankwise
from rankwise.data.metrics import Accuracy

torch.use_deterministic_algorithms(True)
is_gloo = sys.argv[1] == "gloo"
place = "cuda:0" if is_gloo and IS_CUDA else DEVICE
ctx = rankwise.init("gloo" if is_gloo or not IS_CUDA else None, device=place, timeout_s=60)
rank, size = ctx.rank, ctx.world_size
own = slice(rank * NUM_SAMPLES // size, (rank + 1) * NUM_SAMPLES // size)
note("who", {"device": str(ctx.device), "backend": ctx.backend})
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8)  # fmt: skip


def _fill(dtype: torch.dtype, of: int) -> torch.Tensor:
    return (torch.arange(3, device=ctx.device) + of).to(dtype)


@check
def reductions() -> Any:
    """Small whole numbers, which every dtype adds up exactly: what is not what one process finds is named."""
    wrong = []
    ops = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0), "product": lambda x: x.prod(0)}  # fmt: skip
    for op, reduce in ops.items():
        tree = {str(dtype): _fill(dtype, rank) for dtype in DTYPES}
        given = rankwise.all_reduce(tree, op)
        for dtype in DTYPES:
            wanted = reduce(torch.stack([_fill(dtype, of).double() for of in range(size)])).to(dtype)
            one = given[str(dtype)]
            if one.dtype != dtype or one.device != ctx.device or not torch.equal(one, wanted):
                wrong.append(f"{op} {dtype}: {one}")
    mean = rankwise.all_reduce({"x": torch.full((2,), float(rank), device=ctx.device)}, "mean")["x"]
    flags = rankwise.all_reduce(torch.tensor([rank == 0, True, False], device=ctx.device), "all")
    pair = rankwise.all_reduce(torch.tensor([1j * rank, 2.0], device=ctx.device))
    scattered = rankwise.reduce_scatter(torch.arange(2.0 * size, device=ctx.device))
    there = {one.device for one in (mean, flags, pair, scattered)}
    return {"wrong": wrong, "mean": mean.tolist(), "flags": flags.tolist(), "pair": [str(one) for one in pair.tolist()],
            "scattered": scattered.tolist(), "is there": there == {ctx.device}}  # fmt: skip


@check
def movements() -> Any:
    """Large and small ones, of unequal sizes, with objects between."""
    mine = {"rows": torch.full((rank + 1, 2), float(rank), device=ctx.device), "name": f"rank {rank}"}
    gathered = rankwise.all_gather(mine)
    joined = rankwise.all_gather(mine["rows"], concat=True)
    at_root = rankwise.gather(mine["rows"], root=1)
    large = torch.full((1 << 19,), float(rank), device=ctx.device)
    sent = rankwise.broadcast({"large": large, "note": "x"}, root=1)
    swapped = rankwise.all_to_all([torch.tensor([rank * 10 + to], device=ctx.device) for to in range(size)])
    dealt = rankwise.scatter([torch.tensor([to], device=ctx.device) for to in range(size)] if rank == 0 else None)  # fmt: skip
    out = torch.empty(sum(range(1, size + 1)), 2, device=ctx.device)
    rankwise.all_gather_into(out, mine["rows"])
    whole = [joined, out, sent["large"], *swapped, dealt, *(row["rows"] for row in gathered)]
    return {
        "gathered": [[one["rows"].tolist(), one["name"]] for one in gathered], "joined": joined.tolist(), "out": out.tolist(),
        "root": None if at_root is None else [one.tolist() for one in at_root], "sent": sent["large"].unique().tolist(),
        "swapped": [one.tolist() for one in swapped], "dealt": dealt.tolist(), "is there": {one.device for one in whole} == {ctx.device},
    }  # fmt: skip


@check
def gradients_through_collectives() -> Any:
    """Each rank's loss weighs the sum of all by its own number: the gradient is the sum of these numbers."""
    x = torch.ones(2, device=ctx.device, requires_grad=True)
    (rankwise.all_reduce_with_grad(x) * (rank + 1)).sum().backward()
    y = torch.full((1, 2), float(rank), device=ctx.device, requires_grad=True)
    (rankwise.all_gather_with_grad(y) * (rank + 1)).sum().backward()
    return {"reduced": x.grad.tolist(), "gathered": y.grad.tolist()}


@check
def some_ranks() -> Any:
    """A group of the first rank alone, and one of all: ranks outside get through as well."""
    alone, everyone = rankwise.new_group([0]), rankwise.new_group(range(size))
    inside = rankwise.all_reduce(torch.ones(1, device=ctx.device), group=alone).item() if rank == 0 else None
    return {"inside": inside, "all": rankwise.all_reduce(torch.ones(1, device=ctx.device), group=everyone).item()}  # fmt: skip


@check
def ddp_equals_one_process() -> Any:
    """By comm hook: how far the weights are from those of one process; ranks begin with other weights."""
    found = {}
    sgd = rankwise.PowerSGD(rank=1, plain_steps=2)
    for hook, dtype in ((None, torch.float64), ("fp16", torch.float32), ("bf16", torch.float32), (sgd, torch.float32)):  # fmt: skip
        alone = build_model(dtype).to(ctx.device)
        ddp = rankwise.apply_ddp(build_model(dtype, seed=rank), comm_hook=hook)
        train(alone, dtype=dtype)
        train(ddp, own, dtype=dtype)
        rankwise.check_replicas(ddp)
        found["powersgd" if hook is sgd else str(hook)] = measure_difference(ddp.module, alone)
    return found


@check
def accumulated_and_uneven() -> Any:
    """Micro-batches of unequal numbers of samples on each rank, and synced BatchNorm over all ranks."""
    alone = build_model(batchnorm=True).to(ctx.device)
    ddp = rankwise.apply_ddp(build_model(batchnorm=True, seed=rank), sync_batchnorm=True)
    parts = [[(0, 5), (12, 19)], [(5, 12), (19, 24)]][rank] if size == 2 else [(own.start, own.stop)]
    whole = [(0, 12), (12, 24)] if size == 2 else [(0, NUM_SAMPLES)]
    for model, cuts in ((alone, whole), (ddp, parts)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            inputs, targets = draw(step)
            micro = [(inputs[a:b], targets[a:b]) for a, b in cuts]
            num_own = sum(len(x) for x, _ in micro)
            scale = 1 / NUM_SAMPLES if model is alone else rankwise.loss_scale(num_own)
            for x, y in micro if model is alone else rankwise.accumulate(ddp, micro):
                (cross_entropy(model(x), y, reduction="sum") * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"class": type(ddp.module[1]).__module__, "difference": measure_difference(ddp.module, alone)}


@check
def torchs_sync_batchnorm() -> Any:
    """What torch's own layer does on this backend."""
    if not IS_CUDA:
        return None
    alone = build_model(batchnorm=True).to(ctx.device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build_model(batchnorm=True).to(ctx.device))
    ddp = rankwise.apply_ddp(model)
    train(alone)
    train(ddp, own)
    return measure_difference(ddp.module, alone)


@check
def autocast() -> Any:
    """In bfloat16: as far from one process as rounding brings it, and all replicas alike."""
    context = partial(torch.autocast, DEVICE, dtype=torch.bfloat16)
    alone = build_model(torch.float32).to(ctx.device)
    ddp = rankwise.apply_ddp(build_model(torch.float32))
    train(alone, dtype=torch.float32, context=context)
    train(ddp, own, dtype=torch.float32, context=context)
    rankwise.check_replicas(ddp)
    return measure_difference(ddp.module, alone)


@check
def grad_scaler() -> Any:
    """One rank's gradient overflows: no rank moves its weights, and all take half of the scale."""
    ddp = rankwise.apply_ddp(build_model(torch.float32))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1000)
    moved, scales = [], []
    for step in range(3):
        inputs, targets = draw(step, torch.float32)
        if step == 1 and rank == size - 1:
            inputs = inputs * float("inf")
        before = [one.detach().clone() for one in ddp.parameters()]
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = cross_entropy(ddp(inputs[own]).float(), targets[own])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True)))
        scales.append(scaler.get_scale())
    rankwise.check_replicas(ddp)
    return {"moved": moved, "scales": scales}


def _compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@check
def trainer_equals_one_process() -> Any:
    """Accumulation, clipping and an evaluation, against a loop by hand that knows nothing of ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 16, generator=generator, dtype=torch.float64)
    y = x[:, :5].argmax(dim=1)
    losses: list[float] = []

    class Curve(rankwise.train.Callback):
        def on_report(self, trainer: Any, report: Any) -> None:
            losses.extend(report.losses)

    model = build_model(seed=rank)
    trainer = rankwise.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        rankwise.DataLoader(TensorDataset(x, y), global_batch=NUM_SAMPLES, micro_batch=5), _compute_loss, callbacks=[Curve()],
        evaluation=rankwise.train.Evaluation(TensorDataset(x, y), {"accuracy": Accuracy()}, batch_size=16),
        config=rankwise.TrainerConfig(steps=9, clip_norm=0.3, progress=False, log_every=4, fused=False, seed=None),
    )  # fmt: skip
    trainer.fit()
    alone = build_model().to(ctx.device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    sampler = rankwise.GlobalBatchSampler(70, global_batch=NUM_SAMPLES, num_replicas=1, rank=0)
    by_hand: list[float] = []
    while len(by_hand) < 9:
        for indices in sampler:
            loss = cross_entropy(alone(x[indices].to(ctx.device)), y[indices].to(ctx.device))
            loss.backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            by_hand.append(loss.item())
    alone.eval()
    right = (alone(x.to(ctx.device)).argmax(1) == y.to(ctx.device)).double().mean().item()
    worst = max(abs(a - b) for a, b in zip(losses, by_hand, strict=True))
    return {"losses": worst, "weights": measure_difference(trainer.model, alone), "accuracy": [trainer.metrics["accuracy"], right]}  # fmt: skip


@check
def digests_and_capture() -> Any:
    """An optimizer's step becomes a CUDA graph while a digest of the replicas is still on its way from the GPU."""
    if not IS_CUDA:
        return None
    import gc

    def prepare() -> tuple[Any, Any]:
        ddp = rankwise.apply_ddp(build_model(torch.float32))
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01, capturable=True)
        for step in range(3):
            inputs, targets = draw(step, torch.float32)
            optimizer.zero_grad()
            cross_entropy(ddp(inputs[own]), targets[own]).backward()
            optimizer.step()
        return ddp, optimizer

    ddp, optimizer = prepare()
    torch.cuda._sleep(400_000_000)  # the GPU is behind: the digest after the fourth step comes later
    optimizer.step()
    (digests,) = [one for one in gc.get_objects() if type(one).__name__ == "Digests"]
    num_pending = len(digests._pending)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    other, eager = prepare()
    eager.step()
    eager.step()
    torch.cuda.synchronize()
    return {"pending": num_pending, "is on": digests._is_on, "difference": measure_difference(ddp.module, other.module)}  # fmt: skip


dist.barrier()
ctx.close()
