"""Sound programs of the kinds people have get no errors; beside each stands the mistake that looks like it."""

from __future__ import annotations

import pytest

from lint.plain_check import found

_HEAD = """
import copy, os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.load("x.pt"))
"""
_TURNS = """
class Turns:
    def __enter__(self):
        if rank != 0:
            dist.barrier()
    def __exit__(self, *error):
        if rank == {who}:
            dist.barrier()
with Turns():
    print("prepare")
"""
_OWN = """
def fit(number):
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    {sampler}
    for x in DataLoader(data, 8, {how}):
        opt.zero_grad(); model(x).sum().backward(); opt.step()
    return model
{call}
"""
_FUNCTION = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {act}
        return x
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    Sum.apply(model(torch.ones(4))).sum().backward()
    opt.step()
"""
_LOSS = """
model = DDP(nn.Linear(4, 1))
for (x,) in DataLoader(data):
    loss, more = model(x).sum(), torch.tensor(0.0)
    if (x > 0).any():
        more = model(x).mean()
    ({sum}).backward()
"""
_PAST = """
from zoo import share
{use}
model = nn.Linear(4, 1)
ddp = DDP(model)
opt = {opt}
{hook}
for (x,) in DataLoader(data):
    loss = model(x).sum()
    opt.zero_grad(); loss.backward()
    {share}
    opt.step()
    {after}
"""
_NOT = dict.fromkeys(("use", "hook", "share", "after"), "") | {"opt": "torch.optim.SGD(model.parameters())"}
_SGD = "torch.distributed.optim.PostLocalSGDOptimizer(torch.optim.SGD(model.parameters()), None)"
_UNFROZEN = """
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
opt = torch.optim.SGD({given}, lr=0.1)
for step in range(9):
    model.module[0].requires_grad_(True)
    model(torch.ones(4)).sum().backward()
    opt.step()
"""
_RESUME = """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.module.load_state_dict(state["model"])
    first = state["epoch"]
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for epoch in range(first, 9):
    for step, (x,) in enumerate(loader):
        {skip}
        model(x).sum().backward()
        opt.step()
        {inner}
    {last}
"""
_SAVE = 'torch.save({"model": model.module.state_dict(), "epoch": epoch}, "last.pt")'
_MEAN = """
model = nn.Linear(4, 1)
losses = []
for (x,) in DataLoader(data, 8, sampler=DistributedSampler(data), drop_last={drop}):
    losses.append(model(x).mean())
mean = torch.stack(losses).mean()
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
"""
_EVERY = """
def every(loader):
    for x in loader: yield x
def judge(loader):
    for (x,) in every(loader): print(x)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
train, test = DistributedSampler(data), DistributedSampler(data, shuffle=True)
for epoch in range(9):
    {set}
    for (x,) in every(DataLoader(data, 8, sampler=train)):
        opt.zero_grad(); model(x).sum().backward(); opt.step()
    judge(DataLoader(data, 8, sampler=test))
"""
_PLACE = """
class Place:
    def __init__(self):
        self.local = -1
        if os.environ.get("JOB"):
            return self.read()
        self.local = 0
    def read(self):
        self.local = {number}
dist.destroy_process_group()
torch.cuda.set_device(Place().local)
dist.init_process_group("nccl")
"""
_WORK = """
work = None
def finish():
    {wait}
for x in torch.load("x.pt"):
    finish()
    work = dist.all_reduce(x, async_op=True)
finish()
"""
#: A rule, a program, what makes it wrong, and what makes it sound.
_PAIRS = {
    "the order of an evaluation may stay": ("RW501", _EVERY, {"set": ""}, {"set": "train.set_epoch(epoch)"}),
    "what is set before a return": ("RW202", _PLACE, {"number": "0"}, {"number": "int(os.environ['LOCAL_RANK'])"}),
    "a handle that a loop has left": ("RW306", _WORK, {"wait": "print(1)"}, {"wait": "if work is not None: work.wait()"}),
    "a term of the loss from a library": ("RW403", """
import diffusers
model = DDP(diffusers.UNet2DModel.from_pretrained("x"))
for (x,) in DataLoader(data):
    more = torch.tensor(0.0)
    if (x > 0).any():
        more = model(x).mean()
    loss = {sum}
    loss.backward()
    """, {"sum": "more"}, {"sum": "nn.functional.mse_loss(diffusers.predict(x), x) + 0.1 * more"}),
    "a context manager without `as` is entered": ("RW102", _TURNS, {"who": "9"}, {"who": "0"}),
    "there are as many gradients as parameters": ("RW111", """
model = nn.Linear(4, 1)
loss = nn.functional.mse_loss(model(next(iter(DataLoader(data)))[0]), torch.ones(1))
for one in {over}: dist.all_reduce({what})
    """, {"over": "range(int(time.time()) % 3)", "what": "loss"}, {"over": "torch.autograd.grad(loss, list(model.parameters()))", "what": "one"}),
    "a model for each fold of this rank": ("RW401", _OWN, {"sampler": "", "how": "sampler=DistributedSampler(data)", "call": "fit(0)"},
        {"sampler": "", "how": "shuffle=True", "call": "for number in range(rank, 10, world): fit(number)"}),
    "a model that each rank saves": ("RW401", _OWN, {"sampler": "", "how": "sampler=DistributedSampler(data)", "call": "fit(0)"},
        {"sampler": "", "how": "shuffle=True", "call": "torch.save(fit(0).state_dict(), f'{rank}.pt')"}),
    "all data for a model of its own": ("RW504", _OWN, {"sampler": "", "how": "shuffle=True", "call": "fit(0)"},
        {"sampler": "", "how": "shuffle=True", "call": "for number in range(rank, 10, world): fit(number)"}),
    "activations are reduced in a function with its own gradient": ("RW401", _FUNCTION, {"act": "pass"}, {"act": "dist.all_reduce(x)"}),
    "a part of the loss has no graph": ("RW403", _LOSS, {"sum": "more"}, {"sum": "loss + more"}),
    "a copy of weights that were loaded": ("RW410", """
torch.manual_seed(rank)
{made}
mean = copy.deepcopy(model)
model = DDP(model)
    """, {"made": "model = nn.Linear(4, 1)"}, {"made": "import transformers; model = transformers.AutoModel.from_pretrained('gpt2')"}),
    "a step is skipped that was made before": ("RW112", _RESUME, {"skip": "if x.sum() < 3: continue", "inner": "", "last": ""},
        {"skip": "if step < first + 1: continue", "inner": "", "last": ""}),
    "an epoch is saved in the middle": ("RW608", _RESUME, {"skip": "", "inner": "", "last": _SAVE}, {"skip": "", "inner": _SAVE, "last": ""}),
    "ranks have as many samples in equal batches": ("RW612", _MEAN, {"drop": "False"}, {"drop": "True"}),
    "a share that is cut to one length": ("RW109", """
model = DDP(nn.Linear(4, 1))
for x in torch.load("y.pt")[rank::world]{cut}: model(x).sum().backward()
    """, {"cut": ""}, {"cut": "[:100]"}),
    "a function of the user's in a test": ("RW809", """
def is_main(): return rank == 0
if world > 1 and is_main{called}: print("main")
    """, {"called": ""}, {"called": "()"}),
    "a partial of the same name": ("RW819", """
from functools import partial
def run(step, size): dist.barrier()
{made}
run(1)
    """, {"made": ""}, {"made": "run = partial(run, size=3)"}),
    "an optimizer of another library is no model": ("RW402", """
from accelerate import Accelerator
import transformers
accelerator = Accelerator()
model = nn.Linear(4, 1)
opt = transformers.Adafactor(model.parameters())
ddp, opt = accelerator.prepare(model, opt)
({net}(torch.ones(4)).sum()).backward()
    """, {"net": "model"}, {"net": "ddp"}),
    "an unread function may share the gradients of a model": ("RW402", _PAST, _NOT | {"share": "print(loss)"}, _NOT | {"share": "share(model)"}),
    "an unread function may share those of parameters": ("RW402", _PAST, _NOT | {"after": "share(model)"}, _NOT | {"share": "share(model.parameters())"}),
    "a hook may share gradients": ("RW402", _PAST, _NOT, _NOT | {"hook": "for p in model.parameters(): p.register_post_accumulate_grad_hook(share)"}),
    "models are averaged": ("RW402", _PAST, _NOT | {"after": "dist.all_reduce(loss)"},
        _NOT | {"after": "for p in model.parameters(): dist.all_reduce(p.data)"}),
    "an optimizer averages models": ("RW402", _PAST, _NOT, _NOT | {"opt": _SGD}),
    "an unread optimizer may share gradients": ("RW402", _PAST, _NOT,
        _NOT | {"use": "from zoo import SharingOptimizer", "opt": "SharingOptimizer(torch.optim.SGD(model.parameters()), model)"}),
}  # fmt: skip
#: The same, where the second is one of the settings in which it may go wrong.
_MILD = {
    "a folder that is made unless it is there": ("RW516", """
from pathlib import Path
folder = Path("out")
{test}folder.mkdir()
    """, {"test": ""}, {"test": "if not folder.exists(): "}),
    "a state of replicas that one process saves": ("RW105", """
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
accelerator = Accelerator()
if accelerator.is_main_process: {save}
    """, {"save": "dcp.save({}, checkpoint_id='a')"}, {"save": "accelerator.save_state('a')"}),
    "what is unfrozen is not stepped": ("RW405", _UNFROZEN, {"given": "model.parameters()"},
        {"given": "[one for one in model.parameters() if one.requires_grad]"}),
    "nothing says that there is one model": ("RW401", _OWN, {"sampler": "", "how": "sampler=DistributedSampler(data)", "call": "fit(0)"},
        {"sampler": "", "how": "shuffle=True", "call": "fit(0)"}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*_PAIRS, *_MILD])
def test_the_mistake_is_told_and_the_sound_program_is_not(name: str) -> None:
    """The mistake is found, and the sound program that looks like it has no error; no finding at all, unless settings decide."""
    rule, text, wrong, sound = (_PAIRS | _MILD)[name]
    first, second = (_HEAD + _filled(text, one) for one in (wrong, sound))
    assert found(rule, first)
    if name in _MILD:
        assert "error" in {one.severity for one in found(rule, first)}
    assert [one for one in found(rule, second) if name in _PAIRS or one.severity == "error"] == []


def _filled(text: str, parts: dict[str, str]) -> str:
    for key, part in parts.items():
        text = text.replace("{" + key + "}", part)
    return text
