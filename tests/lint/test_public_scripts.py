"""What widely run public scripts have taught the rules: beside each text that is wrong stands one of theirs that looks like it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.registry import rule
from rankwise.lint.running.check import check_unit

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = "import os, math, time, torch, torch.distributed as dist\n"
_INIT = "dist.init_process_group('gloo')\n"
_DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
_ALONE = """
print(int(os.getenv("RANK")))
os.environ["MASTER_PORT"] = "5678"
dist.init_process_group("gloo", world_size=SIZE, rank=0)
dist.get_rank()
"""
_PLATEAU = (
    _INIT
    + """
loader = torch.utils.data.DataLoader(list(range(8)), sampler=torch.utils.data.DistributedSampler(list(range(8))))
net = torch.nn.Linear(1, 1)
rates = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(net.parameters()))
for epoch in range(9):
    total = 0
    for batch in loader:
        total += net(**batch).mean().item()
    rates.step(GIVEN)
"""
)
_LAZY = (
    _DDP
    + _INIT
    + """
data, loader = list(range(8)), None
net = DDP(torch.nn.Linear(1, 1))
for epoch in range(9):
    if TEST:
        loader = torch.utils.data.DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))
    for batch in loader:
        net(batch).sum().backward()
"""
)
#: One process runs the same where there is one GPU: what it does alone, it does with nobody.
_CONVERTED = (
    _DDP
    + """
from torch import nn
from torchaudio.models import Tacotron2
def train(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    net = Tacotron2()
    model = DDP(MODEL)
    for epoch in range(3):
        model(torch.ones(2)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(2))
if __name__ == "__main__":
    count = torch.cuda.device_count()
    if count == 1:
        train(0, 1)
    else:
        torch.multiprocessing.spawn(train, args=(count,), nprocs=count)
"""
)
#: A rule, the text that is wrong, and the one that is not, or of which it is not known.
_PAIRS = {
    "what goes to a device is no file": ("RW601", _INIT + """
if dist.get_rank() != 0:
    f = open("log.txt", "w")
    """, _INIT + """
import sys
if dist.get_rank() != 0:
    sys.stdout, sys.stderr = open(os.devnull, "w"), open("/dev/null", "w")
    open("/dev/stdout", "w").write("")
    """),
    "an option that is a number or a text does not ask for the main process": ("RW101", _INIT + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--main_process", action="store_true")
if parser.parse_args().main_process:
    dist.all_reduce(torch.ones(1))
    """, _INIT + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--main_process", type=int)
parser.add_argument("--master_process", default="")
args = parser.parse_args()
if args.main_process or args.master_process or args.master_node:
    dist.all_reduce(torch.ones(1))
    """),
    "the root of a tree is no process": ("RW101", _INIT + """
from tree import walk
for node in walk():
    if node.is_first_worker: dist.all_reduce(torch.ones(1))
    """, _INIT + """
from tree import walk
for node in walk():
    if node.is_first_node or node.is_root_node() or node.is_lead_gpu or node.primary_node: dist.all_reduce(torch.ones(1))
if dist.get_rank() == node.main_process_rank: print()
else: dist.all_reduce(node.zero_rank)
    """),
    "a backend may be another maker's": ("RW210", "dist.init_process_group('glo')\n", """
dist.init_process_group('cncl')
dist.init_process_group('flagcx')
dist.init_process_group('threaded')
    """),
    "a backend that is missing is taken care of": ("RW210", """
if torch.cuda.is_available(): dist.init_process_group('tcp')
    """, """
try: dist.init_process_group('tcp')
except ValueError: dist.init_process_group('nccl')
if torch.__version__ < '1':
    dist.init_process_group('tcp')
    """),
    "the None that a collective returns is printed": ("RW301", _INIT + """
x = torch.ones(1)
total = dist.all_reduce(x)
print("total", total)
    """, _INIT + """
x = torch.ones(1)
work = dist.all_reduce(x, async_op=True)
work.wait()
print("total", x, work)
    """),
    "it is logged": ("RW301", _INIT + """
x = torch.ones(1)
import wandb
total = dist.all_reduce(x)
wandb.log({"total": total})
    """, _INIT + """
x = torch.ones(1)
import wandb
dist.all_reduce(x)
wandb.log({"total": x})
    """),
    "it is in a text": ("RW301", _INIT + """
x = torch.ones(1)
total = dist.all_reduce(x)
open("log", "a").write(f"{total}")
    """, _INIT + """
x = torch.ones(1)
total = dist.all_reduce(x)
if total is None: total = x
open("log", "a").write(f"{total}")
    """),
    "it is written": ("RW301", _INIT + """
x = torch.ones(1)
import json
json.dump({"total": dist.all_reduce(x)}, open("a.json", "w"))
    """, _INIT + """
x = torch.ones(1)
import json
total = dist.all_reduce(x)
print("reduced" if total is None else total)
    """),
    "torch has no such backend": ("RW210", "dist.init_process_group('tcp')\n", "dist.init_process_group('cpu:gloo,cuda:nccl')\n"),
    "a library that is imported may bring a backend": ("RW210", "dist.init_process_group('ddp')\n", """
import torch_neuronx
dist.init_process_group('ddp')
    """),
    "torch.distributed has no such name": ("RW820", _INIT + """
try:
    dist.recv(torch.ones(1), src=dist.any_source)
except RuntimeError:
    dist.recv(torch.ones(1), src=dist.any_source)
    """, _INIT + """
if hasattr(dist, "any_source"):
    dist.recv(torch.ones(1), src=dist.any_source)
dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 0)])
    """),
    "an early return asks whether the library has a name": ("RW820", """
def run(x):
    if not dist.is_initialized(): return x
    return dist.brand_new(x)
    """, """
def run(x):
    if not hasattr(dist, 'brand_new'): return x
    return dist.brand_new(x)
    """),
    "a flag tells which version is installed": ("RW820", """
print(torch.__version__)
def run(x): return dist.brand_new(x)
    """, """
TORCH9 = tuple(int(x) for x in torch.__version__.split('.')[:2]) >= (9, 0)
def run(x): return dist.brand_new(x) if TORCH9 else x
    """),
    "a library is given a name by its text": ("RW820", "dist.brand_new()\n", "for n in ('brand_new',): setattr(dist, n, print)\ndist.brand_new()\n"),
    "a library is given a name by keyword": ("RW820", "dist.brand_new()\n", "vars(dist).update(brand_new=print)\ndist.brand_new()\n"),
    "a library that is imported may give another one names": ("RW820", "dist.is_xpu_ready()\n", "import torch_npu\ndist.is_xpu_ready()\n"),
    "every module has names of Python's": ("RW820", "print(dist.brand_new)\n", "print(dist.__dict__, dist.__file__, dist.__path__, dist.__spec__)\n"),
    "the caller expects that a name may be missing": ("RW820", """
def via(): return dist.brand_new
via()
    """, """
def via(): return dist.brand_new
try: via()
except AttributeError: pass
    """),
    "ranks broadcast numbers of different types": ("RW317", _INIT + """
value = torch.tensor(dist.get_world_size()) if dist.get_rank() == 0 else torch.zeros(1)
dist.broadcast(value, src=0)
    """, _INIT + """
value = torch.tensor(dist.get_world_size()) if dist.get_rank() == 0 else torch.zeros(1, dtype=torch.long)
dist.broadcast(value, src=0)
    """),
    "Python's int is a long one": ("RW317", *(_INIT + f"""
t = torch.ones(4, dtype=torch.int64) if dist.get_rank() == 0 else torch.zeros(4, dtype={kind})
dist.broadcast(t, 0)
    """ for kind in ("float", "int"))),
    "a type behind the device": ("RW317", *(_INIT + f"""
t = torch.ones(4).to('cpu', torch.float16) if dist.get_rank() == 0 else torch.empty(4, dtype={kind})
dist.broadcast(t, 0)
    """ for kind in ("torch.float32", "torch.float16"))),
    "a type by its name": ("RW317", *(_INIT + f"""
t = torch.ones(4).type({kind}) if dist.get_rank() == 0 else torch.empty(4, dtype=torch.int64)
dist.broadcast(t, 0)
    """ for kind in ("torch.float32", "'torch.LongTensor'"))),
    "a view of another type has as many bytes": ("RW317", *(_INIT + f"""
t = torch.ones(4).view({kind}) if dist.get_rank() == 0 else torch.empty(16, dtype=torch.uint8)
dist.broadcast(t, 0)
    """ for kind in ("2, 2", "torch.uint8"))),
    "a tag pairs a send with its recv": ("RW317", *(_INIT + f"""
if dist.get_rank() == 0:
    for one in [dist.isend(torch.ones(8), dst=1, tag=7), dist.isend(torch.ones(4), dst=1, tag=9)]: one.wait()
elif dist.get_rank() == 1:
    dist.recv(torch.empty(4), 0, tag={first})
    dist.recv(torch.empty(8), 0, tag={16 - first})
    """ for first in (7, 9))),
    "each arm broadcasts its own tensor": ("RW317", _INIT + """
if dist.get_rank() == 0:
    dist.broadcast(torch.arange(10).reshape(2, 5).to("cpu"), src=0)
else:
    dist.broadcast(torch.zeros(5).long(), src=0)
    """, _INIT + """
if dist.get_rank() == 0:
    dist.broadcast(torch.arange(10).reshape(2, 5).to("cpu"), src=0)
else:
    dist.broadcast(torch.zeros(10).long(), src=0)
    """),
    "a recv is of another type than its send": ("RW317", _INIT + """
if dist.get_rank() == 0:
    dist.send(torch.tensor([1, 2]), dst=1)
elif dist.get_rank() == 1:
    dist.recv(torch.zeros(2), src=0)
    """, _INIT + """
if dist.get_rank() == 0:
    dist.send(torch.tensor([1, 2.5]), dst=1)
elif dist.get_rank() == 1:
    dist.recv(torch.zeros(2), src=0)
    """),
    "the rank of several nodes is no number of a GPU": ("RW201", """
import torch.multiprocessing as mp
def work(gpu, node, gpus):
    rank = node * gpus + gpu
    dist.init_process_group("nccl", rank=rank, world_size=2 * gpus)
    torch.cuda.set_device(rank)
if __name__ == "__main__":
    mp.spawn(work, args=(int(input()), torch.cuda.device_count()))
    """, """
import torch.multiprocessing as mp
def work(gpu, node, gpus):
    rank = node * gpus + gpu
    dist.init_process_group("nccl", rank=rank, world_size=2 * gpus)
    torch.cuda.set_device(gpu)
if __name__ == "__main__":
    mp.spawn(work, args=(int(input()), torch.cuda.device_count()))
    """),
    "what mp.spawn gives a function in another file is no global rank": ("RW201", """
def worker(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(dist.get_rank())
    dist.barrier()
    """, """
def worker(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    print(dist.get_rank())
    dist.barrier()
    """),
    "a way of the program without ranks calls what they call": ("RW614", """
import torch.multiprocessing as mp
from torch.utils.tensorboard import SummaryWriter
def main(rank, gpus):
    if gpus > 1:
        dist.init_process_group("nccl", rank=rank, world_size=gpus)
    writer = SummaryWriter("log")
if __name__ == "__main__":
    gpus = int(input())
    if gpus > 1:
        mp.spawn(main, args=(gpus,), nprocs=gpus)
    else:
        main(0, gpus)
    """, """
import torch.multiprocessing as mp
from torch.utils.tensorboard import SummaryWriter
def main(rank, gpus):
    if gpus > 1:
        dist.init_process_group("nccl", rank=rank, world_size=gpus)
    if rank == 0:
        writer = SummaryWriter("log")
if __name__ == "__main__":
    gpus = int(input())
    if gpus > 1:
        mp.spawn(main, args=(gpus,), nprocs=gpus)
    else:
        main(0, gpus)
    """),
    "what fails for want of a group is not said to fail for its backend": ("RW307", """
dist.init_process_group("nccl")
dist.broadcast(torch.zeros(1), src=0)
    """, """
dist.broadcast(torch.zeros(1), src=0)
dist.init_process_group("nccl")
    """),
    "one rank downloads alone": ("RW515", """
import torch.multiprocessing as mp
from torchvision.datasets import CIFAR10
def work(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    CIFAR10("data", download=True)
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
    """, """
import torch.multiprocessing as mp
from torchvision.datasets import CIFAR10
def work(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    CIFAR10("data", download=True)
if __name__ == "__main__":
    mp.spawn(work, args=(1,), nprocs=1)
    """),
    "the rank of several nodes, by the environment, is no number of a GPU": ("RW201", """
def setup(rank):
    dist.init_process_group("nccl", rank=rank, world_size=8)
    torch.cuda.set_device(torch.device(f"cuda:{rank}"))
gpus = torch.cuda.device_count()
setup(int(os.environ["NODE_RANK"]) * gpus + int(os.environ["LOCAL_RANK"]))
    """, """
def setup(rank, gpus):
    dist.init_process_group("nccl", rank=rank, world_size=8)
    torch.cuda.set_device(torch.device(f"cuda:{rank % gpus}"))
gpus = torch.cuda.device_count()
setup(int(os.environ["NODE_RANK"]) * gpus + int(os.environ["LOCAL_RANK"]), gpus)
    """),
    "a process that psutil looks at is none that the script starts": ("RW515", _INIT + """
import psutil
from torchvision.datasets import CIFAR10
print(psutil.Process().memory_info())
CIFAR10("data", download=True)
    """, _INIT + """
import multiprocessing
from torchvision.datasets import CIFAR10
print(multiprocessing.Process(target=work))
CIFAR10("data", download=True)
    """),
    "a number of one rank is told in a text of the old kind": ("RW611", _INIT + _DDP + """
from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(data, sampler=DistributedSampler(data))
ddp, start = DDP(torch.nn.Linear(2, 1)), time.time()
for x in loader:
    loss = ddp(x).mean()
if dist.get_rank() == 0:
    print("loss %.3f after %d s" % (loss.item(), time.time() - start))
    """, _INIT + _DDP + """
from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(data, sampler=DistributedSampler(data))
ddp, start = DDP(torch.nn.Linear(2, 1)), time.time()
for x in loader:
    loss = ddp(x).mean()
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print("loss %.3f after %d s" % (loss.item(), time.time() - start))
    """),
    "an attribute that nothing sets has its default": ("RW504", _INIT + _DDP + """
from torch.utils.data import DataLoader, DistributedSampler
class State:
    def __init__(self):
        self.use_ddp = True
def loader_of(data, state):
    sampler = DistributedSampler(data) if getattr(state, "is_distributed", False) else None
    return DataLoader(data, sampler=sampler)
ddp = DDP(torch.nn.Linear(2, 1))
for x in loader_of(torch.ones(9, 2), State()):
    ddp(x).mean().backward()
    """, _INIT + _DDP + """
from torch.utils.data import DataLoader, DistributedSampler
class State:
    def __init__(self):
        self.use_ddp = True
def loader_of(data, state):
    sampler = DistributedSampler(data) if getattr(state, "is_distributed", False) else None
    return DataLoader(data, sampler=sampler)
ddp, state = DDP(torch.nn.Linear(2, 1)), State()
prepare(state, is_distributed=True)
for x in loader_of(torch.ones(9, 2), state):
    ddp(x).mean().backward()
    """),
    "all ranks but one write a file": ("RW601", _INIT + """
if dist.get_rank() != 0:
    torch.save({}, "model.pt")
    """, _INIT + """
if dist.get_rank() == 1:
    torch.save({}, "model.pt")
    """),
    "a function that is never called overwrites nothing": ("RW207", """
def setup():
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
setup()
    """, """
def setup():
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
    """),
    "one process by the text needs no GPU of its own": ("RW202", """
dist.init_process_group("nccl", rank=0, world_size=2)
torch.nn.Linear(2, 2).cuda()
print(dist.get_rank())
    """, """
dist.init_process_group("nccl", rank=0, world_size=1)
torch.nn.Linear(2, 2).cuda()
print(dist.get_rank())
    """),
    "behind a return for some ranks, the others go on": ("RW601", _INIT + """
local = dist.get_rank() % torch.cuda.device_count()
def save():
    if not os.path.exists("models"):
        return
    torch.save({}, "model.pt")
save()
    """, _INIT + """
local = dist.get_rank() % torch.cuda.device_count()
def save():
    if local != 0:
        return
    torch.save({}, "model.pt")
save()
    """),
    "Slurm tells how many ranks a node has": ("RW317", """
rank, gpus = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_GPUS_ON_NODE"])
dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
local = rank - gpus * (rank // gpus)
if local == 0:
    dist.broadcast(torch.arange(10).to(f"cuda:{local}"), src=0)
else:
    dist.broadcast(torch.zeros(5, dtype=torch.int64).to(f"cuda:{local}"), src=0)
    """, """
rank, gpus = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_GPUS_ON_NODE"])
dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
local = rank - gpus * (rank // gpus)
if local == 0:
    dist.broadcast(torch.arange(10).to(f"cuda:{local}"), src=0)
else:
    dist.broadcast(torch.zeros(10, dtype=torch.int64).to(f"cuda:{local}"), src=0)
    """),
    "a star brings the functions of torch.distributed": ("RW102", """
from torch.distributed import *
init_process_group("gloo")
if get_rank() == 0:
    barrier()
    """, """
from torch.distributed import *
init_process_group("gloo")
if get_world_size() == 0:
    barrier()
    """),
    "two of four processes form a group": ("RW210", """
        import torch.multiprocessing as mp
        def work(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2, init_method="tcp://localhost:29500")
        if __name__ == "__main__":
            mp.spawn(work, nprocs=4)
    """, """
        import torch.multiprocessing as mp
        def work(rank):
            if rank <= 1:
                dist.init_process_group("gloo", rank=rank, world_size=2, init_method="tcp://localhost:29500")
        if __name__ == "__main__":
            mp.spawn(work, nprocs=4)
    """),
    "a teacher trains nothing": ("RW405", _INIT + _DDP + """
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
teacher = DDP(net)
for p in teacher.module[0].parameters():
    p.requires_grad = False
for step in range(3):
    teacher(torch.ones(2)).sum().backward()
    """, _INIT + _DDP + """
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
student, teacher = DDP(torch.nn.Linear(2, 2)), DDP(net)
for p in teacher.parameters():
    p.requires_grad = False
for step in range(3):
    (student(torch.ones(2)) - teacher(torch.ones(2))).sum().backward()
    """),
    "the first process of Fabric has the data before it starts others": ("RW515", """
        from lightning.fabric import Fabric
        from torchvision.datasets import MNIST
        fabric = Fabric(devices=2)
        fabric.launch()
        MNIST("data", download=True)
    """, """
        from lightning.fabric import Fabric
        from torchvision.datasets import MNIST
        MNIST("data", download=True)
        fabric = Fabric(devices=2)
        fabric.launch()
    """),
    "a Fabric of one device has no other ranks": ("RW515", """
        from lightning.fabric import Fabric
        from torchvision.datasets import MNIST
        fabric = Fabric(devices=2)
        MNIST("data", download=True)
    """, """
        from lightning.fabric import Fabric
        from torchvision.datasets import MNIST
        fabric = Fabric(devices=1)
        MNIST("data", download=True)
    """),
    "an exponential of a gathered loss overflows on all ranks or on none": ("RW111", _INIT + """
best = None
for epoch in range(3):
    loss = torch.load("loss.pt")[dist.get_rank()]
    try:
        value = math.exp(time.time())
    except OverflowError:
        value = math.inf
    if best is None or best > value:
        best = value
        dist.barrier()
    """, _INIT + """
best = None
for epoch in range(3):
    loss = torch.load("loss.pt")[dist.get_rank()]
    dist.all_reduce(loss)
    try:
        value = math.exp(loss)
    except OverflowError:
        value = math.inf
    if best is None or best > value:
        best = value
        dist.barrier()
    """),
    "a test that a function out of sight answers may be on the rank": ("RW517", _INIT + """
out = time.strftime("%H%M%S")
if os.environ.get("KEEP"):
    torch.save(1, os.path.join(out, "args.pt"))
    """, _INIT + """
from vision_tools import utils
out = time.strftime("%H%M%S")
if utils.is_primary(os.environ):
    torch.save(1, os.path.join(out, "args.pt"))
    """),
    "whoever has a rank at all is one of all": ("RW109", _INIT + """
steps = 40
if int(os.environ.get("RANK", -1)) != 1:
    steps = int(os.environ["STEPS"])
for step in range(steps):
    dist.all_reduce(torch.ones(1))
    """, _INIT + """
steps = 40
if int(os.environ.get("RANK", -1)) != -1:
    steps = int(os.environ["STEPS"])
for step in range(steps):
    dist.all_reduce(torch.ones(1))
    """),
    "the next epoch is saved beside a log of this one": ("RW608", _INIT + """
state = torch.load("last.pt")
start = state["epoch"]
for epoch in range(start, 9):
    dist.all_reduce(torch.ones(1))
    torch.save({"epoch": epoch}, "last.pt")
    """, _INIT + """
state = torch.load("last.pt")
start = state["epoch"]
for epoch in range(start, 9):
    dist.all_reduce(torch.ones(1))
    torch.save({"epoch": epoch + 1}, "last.pt")
    print({"epoch": epoch})
    """),
    "a port that MPI's first rank has drawn": ("RW208", """
        import socket
        s = socket.socket()
        s.bind(("", 0))
        os.environ["MASTER_PORT"] = str(s.getsockname()[1])
        dist.init_process_group("gloo")
    """, """
        import socket
        from mpi4py import MPI
        s = socket.socket()
        s.bind(("", 0))
        os.environ["MASTER_PORT"] = str(MPI.COMM_WORLD.bcast(s.getsockname()[1], root=0))
        dist.init_process_group("gloo")
    """),
    "a port that the parent of spawned ranks keeps in its arguments": ("RW208", """
        import argparse, random
        import torch.multiprocessing as mp
        def work(rank, args):
            args.url = f"tcp://localhost:{random.randrange(49152, 65535)}"
            dist.init_process_group("gloo", args.url, rank=rank, world_size=2)
        if __name__ == "__main__":
            mp.spawn(work, (argparse.ArgumentParser().parse_args(),), nprocs=2)
    """, """
        import argparse, random
        import torch.multiprocessing as mp
        def work(rank, args):
            dist.init_process_group("gloo", args.url, rank=rank, world_size=2)
        if __name__ == "__main__":
            args = argparse.ArgumentParser().parse_args()
            args.url = f"tcp://localhost:{random.randrange(49152, 65535)}"
            mp.spawn(work, (args,), nprocs=2)
    """),
    "localhost where there is no cluster": ("RW209", """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        args.rank, args.url = int(os.environ["SLURM_NODEID"]), "tcp://localhost:58472"
        dist.init_process_group("gloo", args.url, rank=args.rank, world_size=2)
    """, """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        if "SLURM_JOB_ID" in os.environ:
            args.rank, args.url = int(os.environ["SLURM_NODEID"]), f"tcp://{os.environ['HOST']}:58472"
        else:
            args.rank, args.url = 0, "tcp://localhost:58472"
        dist.init_process_group("gloo", args.url, rank=args.rank, world_size=2)
    """),
    "as many values as keys": ("RW111", _INIT + """
for key in os.listdir("metrics"):
    if time.time() > 5:
        dist.all_reduce(torch.ones(1))
    """, _INIT + """
metrics = {"loss": time.time(), "memory": torch.cuda.memory_allocated()}
for key, value in metrics.items():
    dist.all_reduce(torch.tensor(value))
    """),
    "a wrapper made on first use, before the first rank uses it alone": ("RW107", _DDP + """
class Runner:
    def __init__(self, net):
        self.net = net
    def save(self):
        if dist.get_rank() == 0:
            torch.save(DDP(self.net).state_dict(), "last.pt")
    """, _DDP + """
class Runner:
    def __init__(self, net):
        self.net, self.wrapped = net, None
    @property
    def model(self):
        if self.wrapped is None:
            self.wrapped = DDP(self.net)
        return self.wrapped
    def train(self):
        return self.model(1)
    def save(self):
        if dist.get_rank() == 0:
            torch.save(self.model.state_dict(), "last.pt")
    """),
    "a file that one arm writes alone": ("RW601", _INIT + """
torch.save(1, "last.pt")
    """, """
        def train(rank=0):
            if rank == 0:
                torch.save(1, "last.pt")
        if os.environ.get("DDP"):
            dist.init_process_group("gloo")
            train(dist.get_rank())
        else:
            train()
    """),
    "a helper freezes a part": ("RW405", _INIT + _DDP + """
def freeze(part):
    for p in part.parameters():
        p.requires_grad = False
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model = DDP(net)
freeze(model.module[0])
for step in range(3):
    model(torch.ones(2)).sum().backward()
    """, _INIT + _DDP + """
def freeze(part):
    for p in part.parameters():
        p.requires_grad = False
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
freeze(model[0])
model = DDP(model)
for step in range(3):
    model(torch.ones(2)).sum().backward()
    """),
    "a DTensor is redistributed by all": ("RW105", _INIT + """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
t = distribute_tensor(torch.ones(8), None, [Shard(0)])
if dist.get_rank() == 0:
    t.redistribute(placements=[Replicate()])
    """, _INIT + """
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
t = distribute_tensor(torch.ones(8), None, [Shard(0)])
t = t.redistribute(placements=[Replicate()])
if dist.get_rank() == 0:
    print(t)
    """),
    "a stream of shards is still one stream for all": ("RW510", _INIT + _DDP + """
from torch.utils.data import DataLoader, IterableDataset
class Shards(IterableDataset):
    def __iter__(self):
        yield from open("shard.txt")
model = DDP(torch.nn.Linear(1, 1))
for x in DataLoader(Shards()):
    model(x).sum().backward()
    """, _INIT + _DDP + """
from torch.utils.data import DataLoader, IterableDataset
class Lines(IterableDataset):
    def __iter__(self):
        yield from list(open("lines.txt"))[dist.get_rank()::dist.get_world_size()]
model = DDP(torch.nn.Linear(1, 1))
for x in DataLoader(Lines()):
    model(x).sum().backward()
    """),
    "one constant device is set on all ranks": ("RW202", """
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
    """, """
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    """),
    "a torch seed is not NumPy's": ("RW508", _INIT + """
import numpy
from torch.utils.data import Subset
torch.manual_seed(0)
order = numpy.random.permutation(1000)
train = Subset(range(1000), order[:800])
    """, _INIT + """
import numpy
from torch.utils.data import Subset
numpy.random.seed(0)
order = numpy.random.permutation(1000)
train = Subset(range(1000), order[:800])
    """),
    "a file is read while the first rank writes it": ("RW603", _INIT + """
import json
if dist.get_rank() == 0:
    json.dump({}, open("config.json", "w"))
config = json.load(open("config.json"))
    """, _INIT + """
import json
if dist.get_rank() == 0:
    json.dump({}, open("config.json", "w"))
dist.barrier()
config = json.load(open("config.json"))
    """),
    "shares of a file that may not be divisible": ("RW317", _INIT + """
mine = torch.load("all.pt")[dist.get_rank()::dist.get_world_size()]
dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    """, _INIT + """
mine = torch.load("all.pt")[:4]
dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    """),
    "the model inside, of a class out of sight, is trained": ("RW402", _INIT + _DDP + """
from vit import ViT
model = DDP(ViT())
for step in range(3):
    model.module(torch.ones(2)).sum().backward()
    """, _INIT + _DDP + """
from vit import ViT
model = DDP(ViT())
for step in range(3):
    model(torch.ones(2)).sum().backward()
    """),
    "each rank loads a file of its own": ("RW111", _INIT + """
losses = [float(torch.load(f"loss{dist.get_rank()}.pt")) for _ in range(3)]
if sum(losses) > 3:
    dist.barrier()
    """, _INIT + """
losses = [float(torch.load("loss.pt")) for _ in range(3)]
if sum(losses) > 3:
    dist.barrier()
    """),
    "what is given as the rank is the rank": ("RW302", _INIT + """
loss = torch.ones(1)
dist.reduce(loss, dst=0)
print(loss)
    """, """
        def train(gpu):
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=gpu, world_size=2)
            loss = torch.ones(1)
            dist.reduce(loss, dst=0)
            if gpu == 0:
                print(loss)
    """),
    "a name that becomes the rank": ("RW101", """
        def train(gpu):
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=gpu, world_size=2)
            if gpu == 0:
                dist.all_reduce(torch.ones(1))
    """, """
        def train(gpu):
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=int(os.environ["RANK"]), world_size=2)
            if gpu == 0:
                dist.all_reduce(torch.ones(1))
    """),
    "a folder that pytest gives": ("RW516", _INIT + """
os.makedirs("out")
    """, """
        def test_saving(tmp_path):
            dist.init_process_group("gloo")
            (tmp_path / "out").mkdir()
            dist.barrier()
    """),
    "one entry of a table of settings says nothing of the others": ("RW111", _INIT + """
import settings
args = settings.load()
args["every"] = time.time()
for epoch in range(9):
    if epoch % args["every"] == 0:
        dist.barrier()
    """, _INIT + """
import settings
args = settings.load()
args["start"] = time.time()
for epoch in range(9):
    if epoch % args["every"] == 0:
        dist.barrier()
    """),
    "a bar that one rank shows counts on all": ("RW507", _INIT + """
from torch.utils.data import DistributedSampler
sampler = DistributedSampler(range(9))
for epoch in range(9):
    sampler.set_epoch(epoch + dist.get_rank())
    """, _INIT + """
from torch.utils.data import DistributedSampler
from tqdm.auto import trange
sampler = DistributedSampler(range(9))
for epoch in trange(9, disable=dist.get_rank() != 0):
    sampler.set_epoch(epoch)
    """),
    "an epoch that is read from a file is that of its writer": ("RW507", _INIT + """
import time
from torch.utils.data import DistributedSampler
sampler = DistributedSampler(range(9))
sampler.set_epoch(int(time.time()))
    """, _INIT + """
import os, tempfile
from torch.utils.data import DistributedSampler
sampler = DistributedSampler(range(9))
sampler.set_epoch(torch.load(os.path.join(tempfile.gettempdir(), "last.pt"))["epoch"])
    """),
    "a method that is spawned is the ranks' program": ("RW210", """
class Job:
    def __init__(self, world):
        self.world = world
    def work(self, rank):
        dist.init_process_group("gloo", init_method="tcp://localhost:29500", rank=rank, world_size=self.world)
    def run(self):
        torch.multiprocessing.spawn(self.work, nprocs=2)
if __name__ == "__main__":
    Job(4).run()
    """, """
class Job:
    def __init__(self, world):
        self.world = world
    def work(self, rank):
        dist.init_process_group("gloo", init_method="tcp://localhost:29500", rank=rank, world_size=self.world)
    def run(self):
        torch.multiprocessing.spawn(self.work, nprocs=2)
if __name__ == "__main__":
    Job(2).run()
    """),
    "what only the first rank does skips nothing of the others'": ("RW114", _INIT + """
for step in range(9):
    try:
        torch.load("x.pt")
        dist.all_reduce(torch.ones(1))
    except Exception:
        print("failed")
    """, _INIT + """
for step in range(9):
    if dist.get_rank() == 0:
        try:
            torch.load("x.pt")
            dist.all_reduce(torch.ones(1))
        except Exception:
            print("failed")
    """),
    "an option that the command line does not have": ("RW820", """
        import argparse
        import torch.multiprocessing as mp
        def work(gpu, args):
            dist.init_process_group("gloo", rank=gpu, world_size=2, init_method="tcp://localhost:29500")
            args.batch_size = args.batch_size // 2
        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--gpu", type=int)
            mp.spawn(work, (parser.parse_args(),), nprocs=2)
    """, """
        import argparse
        from elsewhere import add_more
        import torch.multiprocessing as mp
        def work(gpu, args, others):
            dist.init_process_group("gloo", rank=gpu, world_size=2, init_method="tcp://localhost:29500")
            args.batch_size, others.steps = args.batch_size // 2, others.steps + 1
            args.share = 1
            print(args.share)
        if __name__ == "__main__":
            parser, other = argparse.ArgumentParser(), argparse.ArgumentParser()
            parser.add_argument("-b", "--batch-size", type=int)
            add_more(other)
            mp.spawn(work, (parser.parse_args(), other.parse_args()), nprocs=2)
    """),
    "the attribute of an object that nothing sets": ("RW820", _INIT + """
class Trainer:
    def __init__(self, model):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
Trainer(torch.nn.Linear(2, 2))
    """, _INIT + """
from dataclasses import dataclass
from elsewhere import Base
class Plain:
    def setup(self):
        self.gpu = 0
class Trainer(Plain):
    def __init__(self, model):
        self.setup()
        self.model = model.to(self.gpu)
class Other(Base):
    def __init__(self, model):
        self.model = model.to(self.gpu_id)
@dataclass
class Config:
    gpu_ids: int
for kind in (Trainer, Other):
    kind(torch.nn.Linear(2, 2))
print(Config(3).gpu_ids)
    """),
    "one GPU from the command line for all that are spawned": ("RW202", """
        import argparse
        import torch.multiprocessing as mp
        def work(gpu, args):
            dist.init_process_group("nccl", rank=gpu, world_size=2, init_method="tcp://localhost:29500")
            torch.cuda.set_device(args.gpu)
        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--gpu", type=int)
            os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
            mp.spawn(work, (parser.parse_args(),), nprocs=2)
    """, """
        import argparse
        import torch.multiprocessing as mp
        def work(gpu, args):
            dist.init_process_group("nccl", rank=gpu, world_size=2, init_method="tcp://localhost:29500")
            args.gpu = gpu
            torch.cuda.set_device(args.gpu)
        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--gpu", type=int)
            mp.spawn(work, (parser.parse_args(),), nprocs=2)
    """),
    "a function of the user's may mean anything by device_id": ("RW201", _INIT + """
import functools
rank = dist.get_rank()
make = functools.partial(torch.nn.Linear, 2, 2, device=rank)
torch.cuda.set_device(rank)
    """, _INIT + """
import functools
def show(prof, device_id):
    print(prof, device_id)
rank = dist.get_rank()
torch.profiler.profile(on_trace_ready=functools.partial(show, device_id=rank))
    """),
    "what a handler sets is there in some passes only": ("RW820", _INIT + """
class Prefetcher:
    def __init__(self, loader):
        self.loader, self.target = iter(loader), None
    def preload(self):
        self.batch = next(self.loader, None)
reader = Prefetcher([1, 2])
reader.preload()
target = reader.target
target.size(0)
    """, _INIT + """
class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
    def preload(self):
        try:
            self.target = next(self.loader)
        except StopIteration:
            self.target = None
            return
reader = Prefetcher([1, 2])
reader.preload()
target = reader.target
target.size(0)
    """),
    "a model that was never moved stays on the CPU": ("RW406", _INIT + _DDP + """
net = DDP(torch.nn.Linear(2, 2))
net.to("cuda")
net(torch.ones(2)).sum().backward()
    """, _INIT + _DDP + """
net = DDP(torch.nn.Linear(2, 2))
net.to("cpu")
net(torch.ones(2)).sum().backward()
    """),
    "a table of which the entries differ": ("RW111", _INIT + """
if time.time() > 5:
    dist.all_reduce(torch.ones(1))
    """, _INIT + """
scores = {"loss": 0.0, "bits": 0.0}
for _ in range(10):
    got = torch.rand(1)
    for name in scores.keys():
        dist.all_reduce(torch.ones(1))
        scores[name] += got.item()
    """),
    "an attribute that every object has": ("RW820", _INIT + "class Own:\n    x = 1\nprint(Own().dict)\n", _INIT + "class Own:\n    x = 1\nprint(Own().__dict__)\n"),
    "a rate by the loss of a batch's parts": ("RW616", _PLATEAU.replace("GIVEN", "total"), _PLATEAU.replace("GIVEN", "epoch")),
    "a loader made where it lacks": ("RW501", _LAZY.replace("TEST", "loader is None"), _LAZY.replace("TEST", "epoch > 5")),
    "a figure that every rank writes": ("RW601", _INIT + "from matplotlib import pyplot\npyplot.savefig('loss.png')\n", _INIT + "from matplotlib import pyplot\npyplot.savefig(f'loss{dist.get_rank()}.png')\n"),
    "a pass of rank 0 alone through what was converted": ("RW104", _CONVERTED.replace("MODEL", "nn.SyncBatchNorm.convert_sync_batchnorm(net)"), _CONVERTED.replace("MODEL", "nn.Linear(2, 2)")),
    "a group of one": ("RW207", _ALONE.replace("SIZE", "2"), _ALONE.replace("SIZE", "1")),
}  # fmt: skip


def _is_told(rule_id: str, code: str) -> bool:
    unit = CodeUnit(path="train.py", language="python", code=_HEAD + textwrap.dedent(code))
    return bool([*check_unit(unit, Project(), (rule(rule_id),))])


@pytest.mark.parametrize("name", _PAIRS)
def test_the_wrong_one_is_told_and_its_neighbour_is_left_alone(name: str) -> None:
    """Two texts that look alike, and only one of them is wrong."""
    rule_id, wrong, neighbour = _PAIRS[name]
    assert _is_told(rule_id, wrong)
    assert not _is_told(rule_id, neighbour)


@pytest.mark.parametrize(("launch", "severity"), [("--rank", "warning"), ("LOCAL_RANK", "error")])
def test_who_starts_each_rank_by_hand_may_start_one_on_each_host(launch: str, severity: str) -> None:
    """The first GPU for all ranks is an error only where a launcher is known to start several on a host."""
    rank = "args.rank" if launch == "--rank" else "int(os.environ['LOCAL_RANK'])"
    code = f"""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
args = parser.parse_args()
dist.init_process_group("nccl", rank={rank}, world_size=2)
torch.cuda.set_device(0)
"""
    unit = CodeUnit(path="train.py", language="python", code=_HEAD + code)
    assert [found.severity for found in check_unit(unit, Project(), (rule("RW202"),))] == [severity]


def test_each_call_of_a_helper_is_a_mistake_of_its_own() -> None:
    """The first rank calls one helper under two tests: both places are told."""
    helper = "def sync(x):\n    dist.all_reduce(x)\n"
    call = "if dist.get_rank() == 0:\n    sync(torch.ones(1))\nprint()\n"
    unit = CodeUnit(path="train.py", language="python", code=_HEAD + _INIT + helper + call + call)
    assert [found.span.line for found in check_unit(unit, Project(), (rule("RW101"),))] == [6, 9]


def test_a_module_of_the_program_gives_a_library_a_name(tmp_path: Path) -> None:
    """What another module stores in a library is there; where none does, the library lacks it, which another version may not."""
    unit = CodeUnit(
        path=str(tmp_path / "train.py"), language="python", code=_HEAD + "import compat\ndist.brand_new()\n"
    )
    for text, severities in (("x = 1\n", ["warning"]), ("import torch.distributed as d\nd.brand_new = print\n", [])):
        (tmp_path / "compat.py").write_text(text)
        assert [found.severity for found in check_unit(unit, Project(), (rule("RW820"),))] == severities


def test_a_module_of_the_program_sets_the_type_of_floats(tmp_path: Path) -> None:
    """Where another module may set the default type, the type of what is made without one is not known."""
    broadcast = "dist.broadcast(torch.zeros(3) if dist.get_rank() == 0 else torch.empty(3, dtype=torch.float64), 0)\n"
    unit = CodeUnit(
        path=str(tmp_path / "train.py"), language="python", code=_HEAD + "import conf\n" + _INIT + broadcast
    )
    for text, number in (("import torch\n", 1), ("import torch\ntorch.set_default_dtype(torch.float64)\n", 0)):
        (tmp_path / "conf.py").write_text(text)
        assert len(check_unit(unit, Project(), (rule("RW317"),))) == number


def test_a_loss_is_told_in_the_file_that_divides_it(tmp_path: Path) -> None:
    """A program that imports the division has no such line: it is reported where it stands only."""
    step = "def step(ddp):\n    loss = ddp(torch.ones(1, 2)).mean() / dist.get_world_size()\n    loss.backward()\n"
    (tmp_path / "steps.py").write_text(_HEAD + step)
    rest = "step(DDP(torch.nn.Linear(2, 1)))\n"
    for text, number in ((step, 1), ("from steps import step\n", 0)):
        code = _HEAD + _DDP + _INIT + text + rest
        unit = CodeUnit(path=str(tmp_path / "train.py"), language="python", code=code)
        assert len(check_unit(unit, Project(), (rule("RW409"),))) == number


def test_an_option_of_another_module_is_told_where_this_text_reaches_it(tmp_path: Path) -> None:
    """An option declared elsewhere has no line here; a test for None there, too, shows that it may be absent."""
    (tmp_path / "options.py").write_text(
        "import argparse\ndef parse():\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--local_rank', type=int, default=None)\n    args = parser.parse_args()\n"
        "    if args.local_rank is None:\n        print('one process')\n    return args\n"
    )
    code = _HEAD + "from options import parse\nrank = parse().local_rank\n" + _INIT
    unit = CodeUnit(path=str(tmp_path / "train.py"), language="python", code=code)
    found = [*check_unit(unit, Project(), (rule("RW217"),))]
    assert [(one.severity, one.span.line) for one in found] == [("warning", code.count("\n") - 1)]


def test_a_rate_is_told_at_the_call_that_leads_to_it(tmp_path: Path) -> None:
    """The scheduler steps in a module that makes no process group: the program that does calls it."""
    step = "def step(rates):\n    rates.step(time.time())\n"
    (tmp_path / "steps.py").write_text(_HEAD + step)
    rest = "rates = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.ones(1)]))\nstep(rates)\n"
    unit = CodeUnit(
        path=str(tmp_path / "train.py"), language="python", code=_HEAD + _INIT + "from steps import step\n" + rest
    )
    assert [one.span.line for one in check_unit(unit, Project(), (rule("RW616"),))] == [5]


def test_an_attribute_that_a_helper_reads_is_told_at_the_call_of_it(tmp_path: Path) -> None:
    """A helper in another module saves the wrapped model as if it were the one inside."""
    (tmp_path / "helper.py").write_text("def save(model):\n    model.store('x')\n")
    head = _HEAD + _DDP + _INIT + "from helper import save\n"
    text = "class Net(torch.nn.Module):\n    def store(self, path):\n        pass\nddp = DDP(Net())\n"
    for call, number in (("save(ddp)\n", 1), ("save(ddp.module)\n", 0)):
        unit = CodeUnit(path=str(tmp_path / "train.py"), language="python", code=head + text + call)
        found = [*check_unit(unit, Project(), (rule("RW418"),))]
        assert [one.span.line for one in found] == [9] * number
