"""One rank with a GPU of its own: NCCL for CUDA tensors, Gloo for the CPU's, and what needs no second rank."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checks import COMPILER, DEVICE, IS_CUDA, build_model, check, draw, measure_difference, train
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import rankwise
from rankwise import checkpoint
from rankwise.checkpoint.rng import RandomStates
from rankwise.checkpoint.saving import _slots
from rankwise.evidence.in_rank import checksums
from rankwise.evidence.in_rank.flight_recorder import _CaptureGuard
from rankwise.train.dropout import decide_kept

torch.use_deterministic_algorithms(True)
ctx = rankwise.init(device=DEVICE, timeout_s=60)


@check
def who() -> Any:
    current = torch.accelerator.current_device_index() if IS_CUDA else None
    return {"device": str(ctx.device), "backend": ctx.backend, "current": current}


@check
def torchs_collectives() -> Any:
    """On tensors of both devices, in one process group."""
    found = {}
    for device in {"cpu", DEVICE}:
        x = torch.arange(4.0, device=device)
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, parts[0])
        dist.barrier()
        found[device] = out.tolist()
    return found


@check
def our_collectives() -> Any:
    x = torch.arange(4.0, device=DEVICE)
    tree = {"x": x, "n": 3}
    total, whole, sent = rankwise.all_reduce(tree), rankwise.all_gather(tree), rankwise.broadcast(tree)
    rankwise.barrier()
    devices = {one["x"].device.type for one in (total, sent, *whole)}
    return {"values": [one["x"].tolist() for one in (total, *whole, sent)], "devices": sorted(devices)}


@check
def ddp_equals_plain() -> Any:
    """By comm hook: how far the weights are from those of the bare model after four steps."""
    found = {}
    sgd = rankwise.PowerSGD(rank=1, plain_steps=2)
    for hook, dtype in ((None, torch.float64), ("fp16", torch.float32), ("bf16", torch.float32), (sgd, torch.float32)):  # fmt: skip
        plain = build_model(dtype).to(DEVICE)
        ddp = rankwise.apply_ddp(build_model(dtype), comm_hook=hook)
        train(plain, dtype=dtype)
        train(ddp, dtype=dtype)
        found["powersgd" if hook is sgd else str(hook)] = measure_difference(ddp.module, plain)
    return found


@check
def sync_batchnorm() -> Any:
    plain = build_model(batchnorm=True).to(DEVICE)
    ddp = rankwise.apply_ddp(build_model(batchnorm=True), sync_batchnorm=True)
    train(plain)
    train(ddp)
    kind = type(ddp.module[1])
    return {
        "class": f"{kind.__module__}.{kind.__name__}",
        "difference": measure_difference(ddp.module, plain),
    }


@check
def autocast() -> Any:
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        context = partial(torch.autocast, DEVICE, dtype=dtype)
        plain, full = build_model(torch.float32).to(DEVICE), build_model(torch.float32).to(DEVICE)
        ddp = rankwise.apply_ddp(build_model(torch.float32))
        train(plain, dtype=torch.float32, context=context)
        train(full, dtype=torch.float32)
        train(ddp, dtype=torch.float32, context=context)
        with context():
            given = ddp(draw(0, torch.float32)[0]).dtype
        found[str(dtype)] = {
            "given": str(given),
            "to plain": measure_difference(ddp.module, plain),
            "to full precision": measure_difference(ddp.module, full),
        }
    return found


@check
def compiled() -> Any:
    """A compiled model, wrapped, beside the same in eager mode."""
    from torch._dynamo.utils import counters

    eager = build_model(torch.float32).to(DEVICE)
    model = torch.compile(build_model(torch.float32), backend=COMPILER)
    ddp = rankwise.apply_ddp(model)
    train(eager, dtype=torch.float32)
    train(ddp, dtype=torch.float32)
    graphs = counters["stats"]["unique_graphs"]
    return {
        "backend": COMPILER,
        "graphs": graphs,
        "difference": measure_difference(ddp.module._orig_mod, eager),
    }


class Loadable(Dataset[Any]):
    """Large samples, so that a copy takes as long as a step."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((1 << 16,), float(index)), "noise": torch.rand(4), "index": index}


class Carried:
    """What knows by itself how to go to a device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.stream = 0

    def to(self, device: Any) -> Carried:
        moved = Carried(self.x.to(device, non_blocking=True))
        moved.stream = torch.cuda.current_stream().cuda_stream if IS_CUDA else 0
        return moved


def _collate(samples: list[Any]) -> Any:
    return {**torch.utils.data.default_collate(samples), "own": Carried(torch.stack([one["x"] for one in samples]))}  # fmt: skip


def _sum_batches(loader: rankwise.DataLoader, *, busy: bool) -> list[list[float]]:
    """Read each batch's values late: had its memory been given to the next copy meanwhile, they would be others."""
    sums, streams = [], set()
    for batch in loader:
        if busy:
            torch.cuda._sleep(4_000_000)
        sums.append(torch.stack([batch["x"].double().sum(), batch["own"].x.double().sum(), batch["noise"].double().sum(), batch["index"].sum()]))  # fmt: skip
        streams.add(batch["own"].stream)
        del batch
    assert len(streams) == 1, streams
    if busy:
        assert streams == {torch.cuda.current_stream().cuda_stream}
    return [one.tolist() for one in sums]


@check
def prefetched_batches() -> Any:
    """The same batches from a loader to the device as from one to the CPU, without and with workers."""
    found = {}
    for num_workers in (0, 2):
        options = {"global_batch": 8, "num_workers": num_workers, "collate_fn": _collate, "seed": 5}
        wanted = _sum_batches(rankwise.DataLoader(Loadable(), device="cpu", **options), busy=False)
        given = _sum_batches(rankwise.DataLoader(Loadable(), **options), busy=IS_CUDA)
        # The noise is summed up in another order.
        worst = max(abs(a - b) for one, other in zip(wanted, given, strict=True) for a, b in zip(one, other, strict=True))  # fmt: skip
        found[str(num_workers)] = {"batches": len(given), "worst": worst}
    return found


@check
def data_on_the_device() -> Any:
    """Tensors that lie on the device already are batched there."""
    data = TensorDataset(torch.arange(12.0, device=DEVICE), torch.arange(12.0))
    loader = rankwise.DataLoader(data, global_batch=4, shuffle=False)
    batches = [tuple(batch) for batch in loader]
    devices = {one.device.type for batch in batches for one in batch}
    return {"devices": sorted(devices), "values": [one.tolist() for batch in batches for one in batch]}


@check
def staging() -> Any:
    """Tensors of all kinds go through the host's memory to the disk and come back as they were."""
    torch.manual_seed(3)
    wide = torch.randn(64, 48)
    parts = {
        "wide": wide, "transposed": wide.t(), "strided": wide[:, ::2], "half": wide.half(), "bfloat": wide.bfloat16(), "flags": wide > 0,
        "complex": torch.complex(wide, -wide).conj(), "scalar": torch.tensor(7), "none": torch.empty(0, 3), "large": torch.randn(1 << 21),
    }  # fmt: skip
    state = {name: one.to(DEVICE, copy=True) for name, one in parts.items()}
    checkpoint.save("staged", {"state": state}, step=1, background=True)
    for one in state.values():
        one.zero_()  # what is saved is the state at the call
    checkpoint.save("staged", {"state": {"other": torch.ones(3, device=DEVICE)}}, step=2)
    held = {name: torch.zeros_like(one) for name, one in state.items()}
    checkpoint.load("staged/step-1", {"state": held})
    equal = {name: bool(torch.equal(held[name].cpu(), parts[name])) for name in parts}
    buffers = [slot.staging._buffer for path, slot in _slots.items() if Path(path).name == "staged"]
    return {"equal": equal, "devices": sorted({one.device.type for one in held.values()}), "pinned": [one.is_pinned() for one in buffers]}  # fmt: skip


@check
def random_states() -> Any:
    torch.manual_seed(11)
    torch.rand(5, device=DEVICE)
    states = RandomStates()
    kept = states.state_dict()
    first = torch.rand(5, device=DEVICE).tolist()
    states.load_state_dict(kept)
    return {"first": first, "again": torch.rand(5, device=DEVICE).tolist()}


@check
def checksums_of_parameters() -> Any:
    """The sums that a GPU makes of its tensors' bits are those that the CPU makes by the same rule."""
    tensors = [torch.randn(9, 7), torch.randn(3).double(), torch.randn(40).bfloat16(), torch.randn(3 << 20)]
    pending = checksums.read([one.to(DEVICE) for one in tensors], 1)
    if IS_CUDA:
        torch.cuda.synchronize()
    assert pending.is_complete()
    wanted = []
    for one in tensors:
        quota = max(checksums._FEWEST_READ, checksums._MOST_READ // len(tensors))
        total = int(checksums.add_up([one], quota, 1, torch.tensor)[0])
        wanted.append((total ^ (total >> 32)) & 0xFFFF_FFFF)
    return {"sums": pending.sums, "wanted": wanted}


@check
def dropout_masks() -> Any:
    """Masks by position are equal on all devices."""
    tickets, key = torch.arange(64) * 0x9E3779B97F4A7C1, torch.tensor(123456789)
    here = decide_kept(tickets, key, 0.3, [33, 65])
    there = decide_kept(tickets.to(DEVICE), key.to(DEVICE), 0.3, [33, 65]).cpu()
    return {"equal": bool(torch.equal(here, there)), "kept": float(here.double().mean())}


def _step(model: nn.Module, optimizer: Any, inputs: Any, targets: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()


@check
def captured_training() -> Any:
    """A whole step of DDP on NCCL as a CUDA graph; the recorder stands around it, and changes nothing."""
    if not IS_CUDA:
        return None
    inputs, targets = draw(0, torch.float32)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        ddp = rankwise.apply_ddp(build_model(torch.float32))
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01, capturable=True)
        for _ in range(11):  # torch asks for so many: by then DDP has its buckets
            _step(ddp, optimizer, inputs, targets)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _step(ddp, optimizer, inputs, targets)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    plain = build_model(torch.float32).to(DEVICE)
    by_hand = torch.optim.Adam(plain.parameters(), lr=0.01, capturable=True)
    for _ in range(14):
        _step(plain, by_hand, inputs, targets)
    return {"difference": measure_difference(ddp.module, plain), "moved": measure_difference(plain, build_model(torch.float32).to(DEVICE))}  # fmt: skip


@check
def question_while_capturing() -> Any:
    """Another thread may look at an event while this one captures: as the recorder's thread does."""
    if not IS_CUDA:
        return None
    x, event, seen = torch.ones(3, device=DEVICE), torch.cuda.Event(), []
    event.record()
    torch.cuda.synchronize()

    def look() -> None:
        with _CaptureGuard():
            seen.append(event.query())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        y += 1
    graph.replay()
    return {"seen": seen, "y": y.tolist()}


ctx.close()
