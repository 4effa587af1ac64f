"""Rules about arguments and results of collectives (RW301 to RW320): found in several spellings, silent on what is legal."""

from __future__ import annotations

import inspect
import textwrap

import pytest

from lint.plain_check import rule_of
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

HEAD = """\
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""
NCCL = HEAD.replace("gloo", "nccl")
BAD = {
    ("RW301", "quotient"): "x = torch.rand(2)\ndist.all_reduce(x / world)",
    ("RW301", "chain"): "x = torch.rand(2)\ndist.all_reduce(x.detach().float().sum())",
    ("RW301", "list of new tensors"): "x = torch.rand(2)\ndist.all_gather([torch.zeros(2) for _ in range(world)], x)",
    ("RW301", "mask"): "x = torch.rand(2)\ndist.all_reduce(x[x > 0.5])",
    ("RW302", "returned and used"): """
        def mean(v):
            dist.reduce(v, dst=0)
            return v / world
        loss = mean(torch.rand(1))
        if loss < 0.1:
            exit()
    """,
    ("RW302", "second destination"): "x = torch.rand(1)\ndist.reduce(x, dst=3)\nprint(x)",
    ("RW303", "by name of another"): """
        net = DDP(torch.nn.Linear(2, 1))
        out = net(torch.rand(1, 2)).sum()
        dist.all_reduce(out)
        total = out * 2
        total.backward()
    """,
    ("RW304", "named"): "net = torch.nn.Linear(2, 1)\nfor n, w in net.named_parameters():\n    dist.all_reduce(w)",
    ("RW305", "stacked"): """
        net = DDP(torch.nn.Linear(2, 2))
        z = net(torch.rand(3, 2))
        bag = [torch.empty_like(z) for _ in range(world)]
        dist.all_gather(bag, z)
        torch.stack(bag).var().backward()
    """,
    ("RW306", "list nobody reads"): "x = torch.rand(1)\nwork = []\nfor _ in range(2):\n    work.append(dist.all_reduce(x, async_op=True))",
    ("RW306", "gather, read early"): """
        x, parts = torch.rand(1), [torch.zeros(1) for _ in range(world)]
        h = dist.all_gather(parts, x, async_op=True)
        print(torch.cat(parts))
        h.wait()
    """,
    ("RW820", "never wrapped"): "def wrap(net):\n    net = None\n    return net\nnet = wrap(torch.nn.Linear(1, 1))\nprint(net.weight)",
    ("RW819", "too few"): "def finish(self):\n    dist.barrier()\nfinish()",
    ("RW819", "unknown"): "def finish(tag=''):\n    dist.barrier()\nfinish(name='x')",
    ("RW819", "too many"): "def finish():\n    dist.barrier()\nfinish(rank)",
    ("RW313", "the others wait"): "x = torch.rand(1)\nif rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)",
    ("RW313", "two wait for each other"): "x = torch.rand(1)\nif rank == 0:\n    dist.recv(x, 1)\n    dist.send(x, 1)\nelif rank == 1:\n    dist.recv(x, 0)\n    dist.send(x, 0)",
    ("RW308", "length"): "data = [1, 2]\nn = len(data)\ndist.all_reduce(n)",
    ("RW308", "no source"): "dist.broadcast(torch.rand(1))",
    ("RW308", "list in the tensor's place"): "x = torch.rand(1)\ndist.gather([torch.zeros(1), torch.zeros(1)], x)",
    ("RW308", "tensor in the list's place"): "x = torch.rand(1)\ndist.scatter(x, torch.rand(1), src=0)",
    ("RW308", "tensor left out"): "dist.all_gather(tensor_list=[torch.zeros(1), torch.zeros(1)])",
    ("RW308", "unknown name"): "dist.all_reduce(torch.rand(1), operation=dist.ReduceOp.MAX)",
    ("RW308", "item"): "x = torch.rand(1)\ndist.broadcast(x.item(), 0)",
    ("RW308", "added up"): "total = 0\nfor _ in range(2):\n    total += torch.rand(1).item()\ndist.all_reduce(total)",
    ("RW309", "named list"): "x = torch.rand(1)\nbag = [torch.zeros(1) for _ in range(world)]\ndist.gather(x, gather_list=bag)",
    ("RW309", "objects, in the call"): "dist.gather_object(rank, [None] * world, dst=3)",
    ("RW309", "parts"): "x = torch.rand(1)\ndist.scatter(x, list(torch.rand(world).chunk(world)))",
    ("RW310", "none and two"): "box = ['a', 'b'] if rank == 0 else [None]\ndist.broadcast_object_list(box, 0)",
    ("RW311", "by arithmetic"): "x = torch.rand(1)\ndist.reduce(x, dst=(rank + 1) % world)",
    ("RW312", "list from a range"): """
        g = dist.new_group(list(range(1, 3)))
        x = torch.rand(1)
        if rank in (1, 2):
            dist.reduce(x, 0, group=g)
    """,
    ("RW313", "ring"): "x, y = torch.rand(9), torch.rand(9)\ndist.send(x, (rank + 1) % world)\ndist.recv(y, (rank - 1) % world)",
    ("RW314", "computed"): "g = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])",
    ("RW315", "comprehension"): "m = {'a': torch.rand(1)}\nnames = {k for k in m}\n[dist.all_reduce(m[k]) for k in names]",
    ("RW317", "arange"): "dist.all_reduce(x := torch.ones(rank + 1))",
    ("RW320", "one tensor, many times"): "bufs = [torch.zeros(1)] * world\ndist.all_gather(bufs, torch.rand(1))\nprint(bufs)",
    ("RW320", "empty"): "parts = []\ndist.all_gather(parts, torch.rand(1))",
    ("RW320", "empty, of objects"): "dist.all_gather_object([], rank)",
    ("RW320", "empty, each time"): """
        def evaluate(x):
            outs = []
            dist.all_gather(outs, x)
            return torch.cat(outs)
        evaluate(torch.rand(1))
    """,
    ("RW320", "times first"): "x = torch.rand(1)\ndist.all_gather(tensor_list=world * [torch.empty_like(x)], tensor=x)",
}  # fmt: skip
LEGAL = {
    ("RW308", "what may be left out"): """
        x = torch.rand(1)
        dist.broadcast(x, group_src=0)
        dist.recv(x)
        dist.broadcast_object_list([1])
        dist.scatter_object_list([None], src=0)
        dist.scatter(x, [torch.rand(1)] * world if rank == 0 else None)
        dist.all_reduce(*[x], **dict(op=dist.ReduceOp.SUM))
    """,
    ("RW308", "tensor later"): "n = 0\nfor _ in range(2):\n    n += torch.rand(1)\ndist.all_reduce(n)",
    ("RW308", "set by what is out of sight"): """
        from helpers import run
        class Meter:
            def __init__(self):
                self.sum = 0
            def add(self, value):
                self.sum = self.sum + value
            def sync(self):
                dist.all_reduce(self.sum)
        def main():
            total, meter = 0.0, Meter()
            def add(value):
                nonlocal total
                total = total + value
                meter.add(value)
            run(add)
            dist.all_reduce(total)
            meter.sync()
        main()
    """,
    ("RW308", "what kind is asked first"): """
        def mean(value):
            if isinstance(value, float):
                return value
            dist.all_reduce(value)
        def total(value):
            if torch.is_tensor(value):
                dist.all_reduce(value)
        mean(1.0)
        total(1)
        try:
            dist.all_reduce(3)
        except TypeError:
            pass
    """,
    ("RW309", "none elsewhere"): "x = torch.rand(1)\nbag = [torch.zeros(1)] * world if rank == 0 else None\ndist.gather(x, bag, dst=0)",
    ("RW309", "empty elsewhere"): "bag = [None] * (world if rank == 0 else 0)\ndist.gather_object(rank, bag)",
    ("RW309", "chosen by what is out of sight"): """
        from helpers import is_first
        bag = [None] * world if is_first() else None
        dist.gather_object(rank, bag)
        boxes = [None] * (world if is_first() else 0)
        dist.gather_object(rank, boxes)
        slots = None
        if is_first():
            slots = [None] * world
        dist.gather_object(rank, slots)
    """,
    ("RW309", "the others have left before"): """
        from helpers import is_first
        def collect(x):
            bag = [torch.zeros_like(x) for _ in range(world)]
            if not is_first():
                dist.gather(x)
                return
            dist.gather(x, bag)
        collect(torch.rand(1))
    """,
    ("RW309", "each for itself"): """
        import settings
        args = settings.load()
        if args.local_rank == 0:
            dist.gather(torch.ones(1), [torch.zeros(1) for _ in range(world)], dst=0)
        else:
            dist.gather(torch.ones(1), dst=0)
    """,
    ("RW320", "a tensor for each"): "bufs = [torch.zeros(1) for _ in range(world)]\ndist.all_gather(bufs, torch.rand(1))",
    ("RW320", "objects"): "bag = [None] * world\ndist.all_gather_object(bag, rank)",
    ("RW320", "filled before"): "bag = []\nfor _ in range(world):\n    bag.append(torch.zeros(1))\ndist.all_gather(bag, torch.rand(1))",
    ("RW320", "filled by what is out of sight, or under another name"): """
        from helpers import fill, watch
        bag = []
        fill(bag)
        dist.all_gather(bag, torch.rand(1))
        jar = []
        put = jar.append
        for _ in range(world):
            put(torch.zeros(1))
        dist.all_gather(jar, torch.rand(1))
        one = other = []
        other.append(torch.zeros(1))
        dist.all_gather(one, torch.rand(1))
    """,
    ("RW320", "filled by a hook"): """
        box = []
        def keep(module, inputs, out):
            box.append(out)
        net = torch.nn.Linear(1, 1)
        net.register_forward_hook(keep)
        net(torch.rand(1))
        dist.all_gather(box, torch.rand(1))
    """,
    ("RW320", "left before"): """
        from helpers import is_alone
        def collect(x):
            parts = []
            if is_alone():
                return
            dist.all_gather(parts, x)
        collect(torch.rand(1))
    """,
    ("RW320", "replaced one by one"): "bag = [torch.zeros(1)] * world\nfor i in range(world):\n    bag[i] = torch.zeros(1)\ndist.all_gather(bag, torch.rand(1))",
    ("RW320", "not the receiver"): "dist.gather(torch.rand(1), [] if rank else [torch.zeros(1) for _ in range(world)])",
    ("RW301", "kept views"): "x = torch.rand(4)\ndist.all_reduce(x.view(-1))\ndist.all_reduce(x[0])\ndist.all_reduce(x.data)",
    ("RW301", "warm-up"): "dist.all_reduce(torch.zeros(1).to('cpu'))",
    ("RW301", "the source needs no result"): """
        if rank == 0:
            dist.broadcast(torch.tensor([world]), src=0)
        else:
            x = torch.empty(1)
            dist.broadcast(x, src=0)
    """,
    ("RW302", "early return"): """
        def show(v):
            dist.reduce(v, 0)
            if rank != 0:
                return
            print(v.item())
        show(torch.rand(1))
    """,
    ("RW302", "broadcast"): "x = torch.rand(1)\ndist.reduce(x, 0)\ndist.broadcast(x, 0)\nprint(x)",
    ("RW303", "count"): """
        net = DDP(torch.nn.Linear(2, 1))
        count = torch.tensor(3.0)
        dist.all_reduce(count)
        loss = net(torch.rand(1, 2)).sum() / count
        loss.backward()
    """,
    ("RW303", "data"): "net = DDP(torch.nn.Linear(2, 1))\nloss = net(torch.rand(1, 2)).sum()\nlog = loss.detach().clone()\ndist.all_reduce(log)\nloss.backward()",
    ("RW304", "mean"): "net = torch.nn.Linear(2, 1)\nfor w in net.parameters():\n    dist.all_reduce(w.data)\n    w.data /= world",
    ("RW305", "no_grad"): """
        net = DDP(torch.nn.Linear(2, 2))
        z = net(torch.rand(3, 2))
        with torch.no_grad():
            bag = [torch.empty_like(z) for _ in range(world)]
            dist.all_gather(bag, z)
        (z @ torch.cat(bag).t()).mean().backward()
    """,
    ("RW306", "waited in a loop"): "x = torch.rand(1)\nwork = [dist.all_reduce(x, async_op=True)]\nfor w in work:\n    w.wait()\nprint(x)",
    ("RW306", "chained"): "x = torch.rand(1)\ndist.all_reduce(x, async_op=True).wait()",
    ("RW820", "set in the meantime"): "net = None\nif rank >= 0:\n    net = torch.nn.Linear(1, 1)\nprint(net.weight)",
    ("RW820", "set by a name that is not in the text"): "class Config:\n    def __init__(self, **values):\n        for name, value in values.items():\n            object.__setattr__(self, name, value)\nprint(Config(lr=1).lr)",
    ("RW820", "asked for"): "net = None\nif net is not None:\n    print(net.weight)",
    ("RW819", "by a table"): "def finish(tag):\n    dist.barrier()\noptions = {'tag': 1}\nfinish(**options)",
    ("RW819", "decorated"): "import functools\n@functools.cache\ndef finish(a):\n    dist.barrier()\nfinish()",
    ("RW313", "pair"): "x = torch.rand(1)\nif rank == 0:\n    dist.send(x, 1)\nelif rank == 1:\n    dist.recv(x, 0)",
    ("RW310", "same length"): "box = ['a', 'b'] if rank == 0 else [None, None]\ndist.broadcast_object_list(box, 0)",
    ("RW311", "loop"): "x = torch.rand(1)\nfor r in range(world):\n    dist.broadcast(x, src=r)",
    ("RW312", "member"): "g = dist.new_group([1, 2])\nx = torch.rand(1)\nif rank in (1, 2):\n    dist.broadcast(x, 1, group=g)",
    ("RW313", "parity"): """
        x, y, peer = torch.rand(9), torch.rand(9), rank ^ 1
        if rank % 2:
            dist.recv(y, peer)
            dist.send(x, peer)
        else:
            dist.send(x, peer)
            dist.recv(y, peer)
    """,
    ("RW314", "all groups"): "gs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]\nmine = gs[rank // 2]",
    ("RW315", "sorted"): "m = {'a': torch.rand(1)}\nfor k in sorted(set(m)):\n    dist.all_reduce(m[k])",
    ("RW315", "dict"): "m = {'a': torch.rand(1)}\nfor k in m:\n    dist.all_reduce(m[k])",
    ("RW317", "same size"): "x = torch.ones(world)\ndist.all_reduce(x)",
}  # fmt: skip
BAD_NCCL = {
    ("RW307", "numpy"): "import numpy as np\nx = torch.from_numpy(np.zeros(2))\ndist.all_reduce(x)",
    (
        "RW307",
        "gathered",
    ): "x = torch.rand(2, device='cuda').sum().cpu()\nparts = [torch.zeros_like(x) for _ in range(world)]\ndist.all_gather(parts, x)",
}
LEGAL_NCCL = {
    ("RW307", "moved"): "x = torch.tensor(1.0)\nx = x.cuda()\ndist.all_reduce(x)",
    (
        "RW307",
        "group of its own",
    ): "g = dist.new_group(backend='gloo')\nx = torch.tensor(1.0)\ndist.all_reduce(x, group=g)",
}


def found(rule: str, code: str) -> list[str]:
    """Messages of one rule for a program."""
    script = study(CodeUnit(path="train.py", language="python", code=code), Project())
    return [one.message for one in rule_of(rule).check(script)]


@pytest.mark.parametrize(
    ("case", "code"), BAD.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_mistake_is_found(case: tuple[str, str], code: str) -> None:
    """The mistake is found in this spelling."""
    assert found(case[0], HEAD + textwrap.dedent(code))


@pytest.mark.parametrize(
    ("case", "code"), LEGAL.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_legal_form_is_left_alone(case: tuple[str, str], code: str) -> None:
    """What looks alike and is right has no finding."""
    assert found(case[0], HEAD + textwrap.dedent(code)) == []


@pytest.mark.parametrize(
    ("case", "code"), BAD_NCCL.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_mistake_on_nccl_is_found(case: tuple[str, str], code: str) -> None:
    """What breaks on NCCL alone is found where NCCL is written down."""
    assert found(case[0], NCCL + code)
    assert found(case[0], HEAD + code) == []


@pytest.mark.parametrize(
    ("case", "code"), LEGAL_NCCL.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_legal_form_on_nccl_is_left_alone(case: tuple[str, str], code: str) -> None:
    """What is right on NCCL has no finding."""
    assert found(case[0], NCCL + code) == []


def test_signatures_are_those_of_torch() -> None:
    """RW308 knows the names of all parameters, and which of them torch's functions need."""
    dist = pytest.importorskip("torch.distributed")
    for name, act in ACTS.items():
        function = getattr(dist, name.removeprefix("torch.distributed."), None)
        if act.signature and function is not None:
            takes = inspect.signature(function).parameters
            assert act.signature == tuple(takes), name
            assert act.needed == tuple(one for one in takes if takes[one].default is inspect.Parameter.empty), name
