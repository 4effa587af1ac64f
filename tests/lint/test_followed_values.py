"""Rules that follow values: each pair is one program that is wrong, and one that differs in what was computed, not in its names."""

from __future__ import annotations

import pytest

from lint.plain_check import found

_JOB = """
import os, time, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
net = nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters())
"""
_RESUME = """
ck = torch.load("last.pt", map_location="cpu")
net.load_state_dict(ck["net"])
{restore}
start = {start}
model = DDP(net)
for epoch in range(start, 9):
    model(torch.rand(4)).sum().backward()
    opt.step()
    if rank == 0:
        torch.save({{"net": net.state_dict(), "epoch": epoch, "next": epoch + 1}}, "last.pt")
"""
_WHILE = """
from zoo import build
net = build()
step = 0
if os.environ.get("RESUME"):
    ck = torch.load(os.environ["RESUME"], map_location="cpu")
    net.load_state_dict(ck["net"])
    {restore}
    step = ck["step"]
model = DDP(net)
while step < 100:
    model(torch.rand(4)).sum().backward()
    opt.step()
    step += 1
"""
_WITH = """
from filelock import FileLock
from tqdm import tqdm
with {context}:
    torch.save(net.state_dict(), "last.pt")
"""
_LOAD = """
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DDP(net.cuda())
ck = torch.load("last.pt")
{use}
"""
_SHARE = """
x = torch.rand(64, 4)[rank * 4 : rank * 4 + 4]
own = {own}
dist.all_gather([torch.zeros_like(own) for _ in range(world)], own)
"""
_RUNS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--mode")
args = parser.parse_args()
if args.mode == "train":
    if rank == 0:
        torch.save({{}}, "last.pt")
{then} args.mode == "compare" or {then!r} == "if":
    torch.load("last.pt")
"""
_FORMER = """
model = {wrap}
for _ in range(9):
    model(torch.rand(4)).sum().backward()
    opt.step()
"""
_ALONE = """
if {test}:
    net = DDP(net)
buffer = torch.zeros(20)
for step in range(9):
    out = net(torch.rand(4))
    {forward}
    loss = out.sum()
    loss.backward()
    {after}
    opt.step()
"""
_ADD = """
model = DDP(nn.Sequential(nn.Linear(4, 4)))
model.module.more = {part}
"""
_STEP = """
model = DDP(net)
{before}
for x, y in torch.utils.data.DataLoader([(torch.rand(4), torch.rand(4))], sampler=torch.utils.data.DistributedSampler([0])):
    {loop}
{after}
"""
_SPAWN = """
import os, functools, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, n):
    {work}
def named(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner
@named
def wrapped(rank, n): pass
if __name__ == "__main__":
    {before}
    mp.spawn({start}, nprocs=2)
"""
_MET = 'dist.init_process_group("gloo", rank=rank, world_size=n)'
_VALIDATE = "with torch.no_grad(): total += F.mse_loss({model}(x), y).item()"
_SEEDS = """
import random
for seed in (random.seed, torch.manual_seed):
    seed({seed})
data, rest = torch.utils.data.random_split(range(9), [6, 3])
torch.utils.data.DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))
"""
_KEYS = """
from zoo import strip
torch.save(DDP(net).state_dict(), "last.pt")
ck = torch.load("last.pt")
{step}
net.load_state_dict(ck)
"""
#: The rule, a program, and what makes it wrong and what does not.
_PAIRS = {
    "the optimizer is not loaded": ("RW608", _RESUME, {"restore": "", "start": "ck['epoch'] + 1"}, {"restore": "opt.load_state_dict(ck['opt'])", "start": "ck['epoch'] + 1"}),
    "an epoch is done again": ("RW608", _RESUME, {"restore": "opt.load_state_dict(ck['opt'])", "start": "ck['epoch']"}, {"restore": "opt.load_state_dict(ck['opt'])", "start": "ck['next']"}),
    "a loop that counts itself": ("RW608", _WHILE, {"restore": ""}, {"restore": "opt.load_state_dict(ck['opt'])"}),
    "a bar is no lock": ("RW601", _WITH, {"context": "tqdm(total=3)"}, {"context": "FileLock('x')"}),
    "state dicts are computed": ("RW605", _LOAD, {"use": "net.load_state_dict({k[7:]: v for k, v in ck['net'].items()})"}, {"use": "print(ck.keys())"}),
    "a whole model is loaded": ("RW605", _LOAD, {"use": "DDP(ck.get('net'))"}, {"use": "print(ck.get('net'))"}),
    "a model is wrapped by some ranks": ("RW401", _ALONE, {"test": "False", "forward": "", "after": ""}, {"test": "rank", "forward": "", "after": ""}),
    "a gradient is copied first": ("RW401", _ALONE, {"test": "False", "forward": "", "after": "dist.all_reduce(loss.detach())"}, {"test": "False", "forward": "", "after": "buffer[:4] = net.bias.grad; dist.all_reduce(buffer)"}),
    "parts of a model send to each other": ("RW401", _ALONE, {"test": "False", "forward": "print(out)", "after": ""}, {"test": "False", "forward": "dist.send(out, 1)", "after": ""}),
    "layers without parameters": ("RW404", _ADD, {"part": "nn.Linear(4, 4)"}, {"part": "nn.Dropout2d()"}),
    "a sum of losses": ("RW613", _STEP, {"before": "", "loop": "t = F.mse_loss(model(x), y).detach(); dist.all_reduce(t)", "after": ""}, {"before": "", "loop": "t = F.mse_loss(model(x), y, reduction='sum').detach(); dist.all_reduce(t)", "after": ""}),
    "what is computed of a mean": ("RW613", _STEP, {"before": "", "loop": "t = F.mse_loss(model(x), y).detach(); dist.all_reduce(t)", "after": ""}, {"before": "", "loop": "t = torch.isnan(F.mse_loss(model(x), y)).float(); dist.all_reduce(t)", "after": ""}),
    "seconds are no samples": ("RW612", _STEP, {"before": "a = n = 0", "loop": "a += model(x).sum().item(); n += 1", "after": "t = torch.tensor(a / n); dist.all_reduce(t); t /= world"}, {"before": "a = time.time(); n = 0", "loop": "n += 1", "after": "t = torch.tensor((time.time() - a) / n); dist.all_reduce(t); t /= world"}),
    "what rank 0 computes alone": ("RW611", _STEP, {"before": "total = 0", "loop": _VALIDATE.format(model="model"), "after": "if rank == 0: print(total)"}, {"before": "total = 0", "loop": "if rank == 0: total += F.mse_loss(net(x), y).item()", "after": "if rank == 0: print(total)"}),
    "how many samples a batch has": ("RW112", _STEP, {"before": "", "loop": "if x.size(1) < 2: continue\n    model(x).sum().backward()", "after": ""}, {"before": "", "loop": "if x.size(0) < 2: continue\n    model(x).sum().backward()", "after": ""}),
    "a test chooses no_sync": ("RW408", _STEP, {"before": "", "loop": "loss, c = model(x).sum(), model.no_sync() if x.sum() else nn.Identity()\n    with c: loss.backward()", "after": ""}, {"before": "", "loop": "c = model.no_sync() if x.sum() else nn.Identity()\n    with c: model(x).sum().backward()", "after": ""}),
    "a copy is lost": ("RW301", _STEP, {"before": "t = torch.zeros(2)", "loop": "t[0] += 1", "after": "dist.all_reduce(t.cuda())"}, {"before": "t = torch.zeros(2)", "loop": "t[0] += 1", "after": "dist.all_reduce(torch.zeros(2).cuda())"}),
    "ranks start ranks": ("RW220", _SPAWN, {"work": _MET, "before": "os.environ['LOCAL_RANK']", "start": "work, (2,)"}, {"work": "print(rank)", "before": "os.environ['LOCAL_RANK']", "start": "work, (2,)"}),
    "a local rank of the script's own": ("RW220", _SPAWN, {"work": _MET, "before": "os.environ['LOCAL_RANK']", "start": "work, (2,)"}, {"work": _MET, "before": "os.environ.setdefault('LOCAL_RANK', '0'); os.environ['LOCAL_RANK']", "start": "work, (2,)"}),
    "functions that a loop calls": ("RW508", _SEEDS, {"seed": "3 + rank"}, {"seed": "3"}),
    "a look changes no keys": ("RW607", _KEYS, {"step": "print(len(ck))"}, {"step": "strip(ck)"}),
    "a number is no share": ("RW317", _SHARE, {"own": "x.clone()"}, {"own": "torch.tensor(x.sum().item())"}),
    "what is written in another run": ("RW603", _RUNS, {"then": "if"}, {"then": "elif"}),
    "a wrapper of former times": ("RW401", _FORMER, {"wrap": "net"}, {"wrap": "nn.parallel.DistributedDataParallelCPU(net)"}),
}  # fmt: skip


@pytest.mark.parametrize("name", _PAIRS)
def test_only_what_was_computed_decides(name: str) -> None:
    """The wrong one is found and the other one is not."""
    rule_id, script, wrong, right = _PAIRS[name]
    head = "" if script is _SPAWN else _JOB
    assert found(rule_id, head + script.format(**wrong))
    assert found(rule_id, head + script.format(**right)) == []


def test_the_repeated_tensor_is_shown_as_it_was_made() -> None:
    """Not as the collective has filled it."""
    code = _JOB + "parts = [torch.zeros(1)] * world\ndist.all_gather(parts, torch.ones(1))\n"
    (one,) = found("RW320", code)
    assert "`[torch.zeros(1)] * world`" in one.message
    assert "`[torch.zeros(1) for _ in range(world_size)]`" in one.fix


def test_a_part_of_a_hidden_model_belongs_to_its_wrapper() -> None:
    """Of two wrapped models, the one that gets the layer is named."""
    code = _JOB + "from zoo import build\none = DDP(net)\ntwo = DDP(build())\ntwo.module.head = nn.Linear(4, 4)\n"
    (one,) = found("RW404", code)
    assert "after `two` was wrapped" in one.message
