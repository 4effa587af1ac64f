"""What scripts of users on public hosts have taught the rules: beside each text that is wrong stands one that looks like it."""

from __future__ import annotations

import pytest

from lint.test_public_scripts import _DDP, _INIT, _is_told

_SHUFFLED = (
    _INIT
    + _DDP
    + """
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=SHUFFLE))
model = DDP(torch.nn.Linear(2, 1))
for epoch in range(3):
    for x in loader:
        model(x).sum().backward()
"""
)
#: A loop over this rank's share, up to the loss.
_SHARE = (
    _DDP
    + """
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
sampler = DistributedSampler(rows)
model, total, seen = DDP(torch.nn.Linear(2, 1)), 0.0, 0
for x in DataLoader(rows, sampler=sampler):
    loss = model(x).mean()
    loss.backward()"""
)
_ACCURACY = (
    _INIT
    + _DDP
    + """
from torch.utils.data import DataLoader, DistributedSampler
rows, right, seen = list(torch.rand(64, 2)), 0, 0
net = DDP(torch.nn.Linear(2, 1))
with torch.no_grad():
    for x in DataLoader(rows, sampler={sampler}):
        right += (net(x) > 0).sum().item()
        seen += len(x)
if dist.get_rank() == 0:
    print("accuracy", right / seen)
"""
)
_OPTION = """
import argparse, deepspeed, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
START
print(args.local_rank)
"""
_PREPARED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator, right = Accelerator(), 0
net, loader = accelerator.prepare(torch.nn.Linear(2, 1), DataLoader(list(torch.rand(64, 2))))
size = len(loader.dataset)
for x in loader:
    right += (net(x) > 0).sum().item()
right = COUNTED
right /= size
print(right)
"""
_CONFIGURED = """
import json
from transformers import AutoModel, Trainer, TrainingArguments
path = "zero2.json"
model = AutoModel.from_pretrained("bert")
trainer = Trainer(model=model, args=TrainingArguments("out", deepspeed={config}))
trainer.train()
model.save_pretrained("out/last")
"""
_TRIES = (
    _INIT
    + """
import sys, time
from torchvision import datasets
try:
    rows = datasets.MNIST("d", download=True)
except Exception as error:
    print(error)
    {handler}
"""
)
_PARENT = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=3)
    dist.barrier()
if __name__ == "__main__":
    {before}
    mp.spawn(work, nprocs=2)
    dist.destroy_process_group()
"""
_CLEANS = (
    _PARENT.format(before="")
    .replace("    dist.destroy_process_group()", "    clean()")
    .replace("def work", "def clean():\n    {asks}\n    dist.destroy_process_group()\ndef work")
)
_LOCAL_SGD = (
    _INIT
    + """
class Averaging:
    def __init__(self, optimizer):
        self.optimizer = optimizer
    def step(self):
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(MEANT)
net = torch.nn.Linear(2, 1)
own = Averaging(torch.optim.SGD(net.parameters(), 0.1))
for x in [torch.rand(4, 2)]:
    net(x).sum().backward()
    own.step()
"""
)
_TURNS = (
    _INIT
    + _DDP
    + """
import itertools, tqdm
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
loader = DataLoader(rows, sampler=DistributedSampler(rows))
batches, model = loader, DDP(torch.nn.Linear(2, 1))
if dist.get_rank() == 0:
    batches = TAKEN
for x in batches:
    model(x).mean().backward()
"""
)
_SUMMED = (
    _INIT
    + _DDP
    + """
model = DDP(torch.nn.Linear(2, 1))
own = model(torch.rand(4, 2)).mean()
loss = REDUCED / dist.get_world_size()
loss.backward()
"""
)
_REPLAY = (
    _INIT
    + """
from collections import deque
net, replay = torch.nn.Linear(2, 1), deque(maxlen=99)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(99):
    fresh, parts = [torch.rand(2)], [None] * dist.get_world_size()
    dist.all_gather_object(parts, fresh)
    for part in parts:
        replay.extend(GATHERED)
    net(draw(replay)).sum().backward()
    opt.step()
"""
)
_ADAPTERS = (
    _INIT
    + _DDP
    + """
from peft import LoraConfig, get_peft_model
from transformers import PaliGemmaForConditionalGeneration
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
model = get_peft_model(PaliGemmaForConditionalGeneration.from_pretrained("base"), LoraConfig(r=8))
model = WRAPPED
opt = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, sampler=DistributedSampler(rows)):
    model(batch).loss.backward()
    opt.step()
"""
)
_EPOCHS = (
    _DDP
    + """
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
sampler = DistributedSampler(rows)
loader, model, step = DataLoader(rows, sampler=sampler), DDP(torch.nn.Linear(2, 1)), 0
for epoch in range(9):
    sampler.set_epoch(step)
    for x in loader:
        model(x).mean().backward()
    step = COUNTED
"""
)
_JUDGED = (
    _INIT
    + _DDP
    + """
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(61, 2))
model, right, seen = DDP(torch.nn.Linear(2, 1)), 0, 0
with torch.no_grad():
    for x in DataLoader(rows, sampler=SAMPLER):
        right += (model(x) > 0).sum().item()
        seen += len(x)
mean = torch.tensor([right / seen])
dist.all_reduce(mean)
mean /= dist.get_world_size()
"""
)
_PAST = (
    _INIT
    + _DDP
    + """
net = torch.nn.Linear(2, 1)
model = DDP(net)
net(torch.rand(4, 2)).sum().backward()
for p in net.parameters():
    dist.all_reduce(REDUCED)
"""
)
#: A rule, the text that is wrong, and the one that is not, or of which it is not known.
_PAIRS = {
    "a process that gets the number of a loop is the rank of that number": ("RW202", _DDP + """
from torch.multiprocessing import Process
def work(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    model = DDP(torch.nn.Linear(2, 1).cuda())
if __name__ == "__main__":
    for number in range(2):
        Process(target=work, args=(number, 2)).start()
    """, _DDP + """
from torch.multiprocessing import Process
def work(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    model = DDP(torch.nn.Linear(2, 1).cuda())
if __name__ == "__main__":
    for number in range(2):
        Process(target=work, args=(number, 2)).start()
    """),
    "where the same setting excludes the group, there is one process": ("RW202", """
import settings
args = settings.load()
if args.distributed:
    dist.init_process_group("nccl")
model = torch.nn.Linear(2, 1).to("cuda:0")
    """, """
import settings
args = settings.load()
if args.distributed:
    dist.init_process_group("nccl")
def build():
    if args.distributed:
        return torch.nn.Linear(2, 1)
    return torch.nn.Linear(2, 1)
if not args.distributed:
    print()
else:
    model = build()
if args.distributed:
    pass
else:
    model = torch.nn.Linear(2, 1).to("cuda:0")
    """),
    "a wrapper's constructor is a meeting": ("RW603", """
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
if accelerator.is_main_process:
    torch.save(model.state_dict(), "m.pt")
model.load_state_dict(torch.load("m.pt", map_location="cpu"))
    """, """
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
if accelerator.is_main_process:
    torch.save(model.state_dict(), "m.pt")
model = accelerator.prepare(model)
model.load_state_dict(torch.load("m.pt", map_location="cpu"))
    """),
    "a compiled wrapper has no more attributes than the wrapper": ("RW418", _INIT + _DDP + """
class Net(torch.nn.Module):
    classes = 2
model = torch.compile(DDP(Net()))
print(model.classes)
    """, _INIT + _DDP + """
class Net(torch.nn.Module):
    classes = 2
model = torch.compile(Net())
print(model.classes)
model = DDP(model)
    """),
    "what one rank was given, the others lack": ("RW818", _INIT + _DDP + """
if dist.get_rank() == 0:
    log = open("log.txt", "w")
for step in range(9):
    if step % 3 == 0:
        log.write("x")
    """, _INIT + _DDP + """
log = None
if dist.get_rank() == 0:
    log = open("log.txt", "w")
for step in range(9):
    if log is not None:
        log.write("x")
    """),
    "an attribute that one rank was given, the others lack": ("RW818", _INIT + _DDP + """
class Job:
    def __init__(self):
        if dist.get_rank() == 0:
            self.best = 0
    def run(self):
        print(self.best)
Job().run()
    """, _INIT + _DDP + """
class Job:
    def __init__(self):
        if dist.get_rank() == 0:
            self.best = 0
    def run(self):
        if dist.get_rank() == 0:
            print(self.best)
Job().run()
    """),
    "the local rank is not the rank": ("RW210", """
dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    """, """
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    """),
    "all ranks find that there is no file, and write it": ("RW601", _INIT + _DDP + """
if not os.path.exists("words.bin"):
    torch.save([1], "words.bin")
    """, _INIT + _DDP + """
if dist.get_rank() == 0 and not os.path.exists("words.bin"):
    torch.save([1], "words.bin")
    """),
    "a scaler that looks at one shard": ("RW419", _INIT + """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(torch.nn.Linear(2, 1))
scaler = torch.cuda.amp.GradScaler()
    """, _INIT + """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(torch.nn.Linear(2, 1))
scaler = torch.cuda.amp.GradScaler(enabled=False)
    """),
    "a function that has the local rank, too, and takes the other one": ("RW201", _DDP + """
def run(rank, world_size, local_rank):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.cuda.set_device(local_rank)
    return DDP(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
    """, _DDP + """
def run(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    return DDP(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
    """),
    "what each rank does in a function that nothing here calls": ("RW515", """
from torchvision.datasets import MNIST
def run(args):
    dist.init_process_group("nccl")
    print("rank", dist.get_rank())
    return MNIST("data", download=True)
    """, """
from torchvision.datasets import MNIST
def run(args):
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        MNIST("data", download=True)
    dist.barrier()
    """),
    "a launcher that passes the local rank": ("RW217", _OPTION.replace("START", 'dist.init_process_group("gloo")'), _OPTION.replace("START", "deepspeed.init_distributed()")),
    "processes that are started by hand get their rank": ("RW217", """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.cuda.set_device(args.local_rank)
    """, """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
dist.init_process_group("gloo", rank=args.local_rank, world_size=4, init_method="tcp://10.0.0.1:6585")
    """),
    "a method that another one tells who the rank is": ("RW302", """
class Loop:
    def __init__(self):
        self.join()
    def join(self):
        dist.init_process_group("gloo")
        self.local_rank = int(os.environ["LOCAL_RANK"])
    def score(self):
        loss = torch.ones(1)
        dist.reduce(loss, dst=0)
        self.log.add_scalar("loss", loss.item())
    """, """
class Loop:
    def __init__(self):
        self.join()
    def join(self):
        dist.init_process_group("gloo")
        self.local_rank = int(os.environ["LOCAL_RANK"])
    def score(self):
        loss = torch.ones(1)
        dist.reduce(loss, dst=0)
        if self.local_rank == 0:
            self.log.add_scalar("loss", loss.item())
    """),
    "a method that only the first rank is sent to": ("RW601", """
class Loop:
    def __init__(self):
        dist.init_process_group("gloo")
        self.local_rank = int(os.environ["LOCAL_RANK"])
    def save(self):
        torch.save([1], "x.pt")
    """, """
class Loop:
    def __init__(self):
        dist.init_process_group("gloo")
        self.local_rank = int(os.environ["LOCAL_RANK"])
    def save(self):
        torch.save([1], "x.pt")
    def train(self):
        if self.local_rank == 0:
            self.save()
    """),
    "a count of one share that is divided in place": ("RW611", _DDP + """
from torch.utils.data import DataLoader, DistributedSampler
rows = list(torch.rand(64, 2))
loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
def judge(net, loader):
    size, right = len(loader.dataset), 0
    with torch.no_grad():
        for x in loader:
            right += (net(x) > 0).sum().item()
    right /= size
    return right
judge(DDP(torch.nn.Linear(2, 1)), loader)
    """, _DDP + """
rows = list(torch.rand(64, 2))
def judge(net, loader):
    size, right = len(loader.dataset), 0
    for x in loader:
        right += (net(x) > 0).sum().item()
    right /= size
    return right
judge(DDP(torch.nn.Linear(2, 1)), torch.utils.data.DataLoader(rows))
    """),
    "losses of one share over the number of all samples": ("RW611", _SHARE + """
    total += loss.item() * len(x)
print(total / len(rows))
    """, _SHARE + """
    total += loss.item() * len(x)
    seen += len(x)
print(total / seen)
    """),
    "an accuracy of one share beside the time of the epoch": ("RW611", _DDP + """
import time
from torch.utils.data import DataLoader, DistributedSampler
rows, right, start = list(torch.rand(64, 2)), 0, time.time()
net = DDP(torch.nn.Linear(2, 1))
with torch.no_grad():
    for x in DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False)):
        right += (net(x) > 0).sum().item()
if dist.get_rank() == 0:
    print(f"{right / 32:.3f} in {time.time() - start:.1f} s")
    """, _DDP + """
import time
from torch.utils.data import DataLoader, DistributedSampler
rows, right, start = list(torch.rand(64, 2)), 0, time.time()
net = DDP(torch.nn.Linear(2, 1))
with torch.no_grad():
    for x in DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False)):
        right += (net(x) > 0).sum().item()
if dist.get_rank() == 0:
    print(f"{(time.time() - start) / 32:.1f} s a batch")
    """),
    "a collective that tells the address to meet at": ("RW205", """
import os, torch, torch.distributed as dist
def start(rank):
    address = torch.zeros(15)
    dist.broadcast(address, src=0)
    dist.init_process_group("gloo", rank=rank, world_size=2)
start(int(os.environ["RANK"]))
    """, """
import os, torch, torch.distributed as dist
def start(rank):
    address = torch.zeros(15)
    if dist.is_initialized():
        dist.broadcast(address, src=0)
    dist.init_process_group("gloo", rank=rank, world_size=2)
start(int(os.environ["RANK"]))
    """),
    "the process that starts the ranks has no group": ("RW205", _PARENT.format(before=""), _PARENT.format(before="dist.init_process_group('gloo', rank=2, world_size=3)")),
    "the process that starts the ranks asks for a group": ("RW205", _PARENT.format(before=""), _PARENT.format(before="").replace("    dist.destroy", "    if dist.is_available() and dist.is_initialized():\n        dist.destroy")),
    "the process that starts the ranks asks for a group in a helper": ("RW205", _CLEANS.format(asks=""), _CLEANS.format(asks="if not dist.is_initialized(): return")),
    "a file to meet at, and no rank": ("RW210", "dist.init_process_group('gloo', 'file:///tmp/meet', world_size=4)", "dist.init_process_group('gloo', 'file:///tmp/meet?rank=1', world_size=4)"),
    "a handler that ends the process takes care of nothing": ("RW515", _TRIES.format(handler="sys.exit(1)"), _TRIES.format(handler="rows = None")),
    "a handler that raises again takes care of nothing": ("RW515", _TRIES.format(handler="raise"), _TRIES.format(handler="time.sleep(5)")),
    "the Trainer's arguments that name a DeepSpeed configuration make a group": ("RW601", _CONFIGURED.format(config="path"), _CONFIGURED.format(config="None")),
    "a count of a share that a framework made, over all samples": ("RW611", _PREPARED.replace("COUNTED", "right"), _PREPARED.replace("COUNTED", "accelerator.reduce(right)")),
    "an accuracy of one share, and of all samples on each rank": ("RW611", _ACCURACY.format(sampler="DistributedSampler(rows)"), _ACCURACY.format(sampler="None")),
    "ranks that start the group in different ways": ("RW210", """
import os, torch.distributed as dist
def serve():
    dist.init_process_group("gloo", rank=0, world_size=4)
def work(rank):
    dist.init_process_group("nccl", rank=rank, world_size=4)
rank = int(os.environ["RANK"])
if rank == 0:
    serve()
else:
    work(rank)
    """, """
import os, torch.distributed as dist
def serve():
    dist.init_process_group("gloo", rank=0, world_size=4)
def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=4)
rank = int(os.environ["RANK"])
if rank == 0:
    serve()
else:
    work(rank)
    """),
    "each rank has the backend that it named": ("RW307", """
import os, torch, torch.distributed as dist
if int(os.environ["RANK"]) == 0:
    dist.init_process_group("gloo")
    dist.recv(torch.zeros(1), 1)
else:
    dist.init_process_group("nccl")
    dist.send(torch.zeros(1), 0)
    """, """
import os, torch, torch.distributed as dist
if int(os.environ["RANK"]) == 0:
    dist.init_process_group("nccl")
    dist.recv(torch.zeros(1, device="cuda"), 1)
else:
    dist.init_process_group("gloo")
    dist.send(torch.zeros(1), 0)
    """),
    "a function that rank 0 never calls": ("RW102", _INIT + """
def work():
    if rank == 0:
        dist.barrier()
work()
    """, _INIT + """
def work():
    if rank == 0:
        dist.barrier()
if rank != 0:
    work()
    """),
    "weights that are averaged through the optimizer": ("RW401", _LOCAL_SGD.replace("MEANT", "torch.ones(1)"), _LOCAL_SGD.replace("MEANT", "p.data")),
    "a bar that rank 0 puts around its loader": ("RW109", _INIT + """
import torch.utils.data
rank, world = dist.get_rank(), dist.get_world_size()
rows = [torch.rand(2) for _ in range(9)]
for x in rows[rank::world]:
    dist.all_reduce(x)
    """, _INIT + """
import torch.utils.data
from tqdm import tqdm
def run(loader):
    if dist.get_rank() == 0:
        loader = tqdm(desc="train", iterable=loader)
    for x in loader:
        dist.all_reduce(x)
run(torch.utils.data.DataLoader([torch.rand(2) for _ in range(9)]))
    """),
    "a bar that rank 0 chooses, around what nothing is known of": ("RW109", _INIT + """
rank, world = dist.get_rank(), dist.get_world_size()
def run(n, rows):
    for x in range(n) if rank == 0 else range(rank, n):
        dist.all_reduce(x)
run(size(), names())
    """, _INIT + """
from tqdm import tqdm
rank, world = dist.get_rank(), dist.get_world_size()
def run(n, rows):
    for x in tqdm(range(n)) if rank == 0 else range(n):
        dist.all_reduce(x)
    if rank == 0:
        rows = tqdm(rows)
    for x in rows:
        dist.all_reduce(x)
run(size(), names())
    """),
    "a share that is as long as the others": ("RW109", _INIT + """
rank, world = dist.get_rank(), dist.get_world_size()
rows = [torch.rand(2) for _ in range(9)]
def run(loader):
    for x in loader:
        dist.all_reduce(x)
run([x for number, x in enumerate(rows) if number % world == rank])
    """, _INIT + """
from torch.utils.data import DataLoader, DistributedSampler
rank, world = dist.get_rank(), dist.get_world_size()
def work():
    rows = [torch.rand(2) for _ in range(9)]
    loader = DataLoader(rows, sampler=DistributedSampler(rows, num_replicas=world - 1, rank=rank - 1))
    for x in enumerate(loader):
        dist.all_reduce(x[1])
if rank != 0:
    work()
    """),
    "a shuffle that is a number": ("RW501", _SHUFFLED.replace("SHUFFLE", "64"), _SHUFFLED.replace("SHUFFLE", "0")),
    "a download unless the data is there": ("RW515", _INIT + """
import os
from torchvision.datasets import MNIST
missing = not os.path.exists("data/MNIST")
MNIST("data", download=missing)
    """, _INIT + """
import os
from torchvision.datasets import MNIST
missing = not os.path.exists("data/MNIST")
if dist.get_rank() == 0:
    MNIST("data", download=missing)
dist.barrier()
MNIST("data", download=False)
    """),
    "a folder of events with this rank's own time in its name": ("RW517", _INIT + """
import time
from torch.utils.tensorboard.writer import SummaryWriter
writer = SummaryWriter(log_dir="runs/" + time.ctime())
    """, _INIT + """
import time
from torch.utils.tensorboard.writer import SummaryWriter
name = [time.ctime()]
dist.broadcast_object_list(name, src=0)
writer = SummaryWriter(log_dir="runs/" + name[0])
if dist.get_rank() == 0:
    writer = SummaryWriter(log_dir="runs/" + time.ctime())
    """),
    "a table of names that is only read": ("RW804", "import argparse\nprint(argparse.Namespace().__dict__, missing)\n", "import argparse\nargparse.__dict__.update(missing=1)\nprint(missing)\n"),
    "an address that no host has": ("RW209", """
import argparse, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--url", default="tcp://224.66.41.62:23456")
parser.add_argument("--rank", type=int)
args = parser.parse_args()
dist.init_process_group("gloo", init_method=args.url, rank=args.rank, world_size=2)
    """, """
import argparse, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--url", default="tcp://22.66.41.62:23456")
parser.add_argument("--rank", type=int)
args = parser.parse_args()
dist.init_process_group("gloo", init_method=args.url, rank=args.rank, world_size=2)
    """),
    "a model with adapters is a model": ("RW401", _ADAPTERS.replace("WRAPPED", "model"), _ADAPTERS.replace("WRAPPED", "DDP(model)")),
    "a loss that is divided before it is averaged": ("RW409", _DDP + """
import os
world = int(os.environ["WORLD_SIZE"])
model, scaler = DDP(torch.nn.Linear(2, 1)), torch.amp.GradScaler()
losses = {"total": model(torch.rand(4, 2)).mean()}
loss = losses["total"] / world
scaler.scale(loss).backward()
    """, _DDP + """
import os
world = int(os.environ["WORLD_SIZE"])
model, scaler = DDP(torch.nn.Linear(2, 1)), torch.amp.GradScaler()
losses = {"total": model(torch.rand(4, 2)).mean()}
print(losses["total"] / world)
scaler.scale(losses["total"] / 4).backward()
    """),
    "an order that rank 0 sends in a list": ("RW508", _INIT + """
from torch.utils.data import Subset
order = torch.randperm(99).tolist()
Subset(list(range(99)), order[:10])
    """, _INIT + """
from torch.utils.data import Subset
order = torch.randperm(99).tolist()
dist.broadcast_object_list([order], src=0)
Subset(list(range(99)), order[:10])
    """),
    "a step that nobody counts on": ("RW502", _EPOCHS.replace("COUNTED", "0"), _EPOCHS.replace("COUNTED", "step + 1")),
    "a mean over what all ranks go over": ("RW612", _JUDGED.replace("SAMPLER", "DistributedSampler(rows)"), _JUDGED.replace("SAMPLER", "None")),
    "tags that never meet": ("RW313", _INIT + """
if dist.get_rank() == 0:
    dist.send(torch.ones(1), 1, tag=1)
elif dist.get_rank() == 1:
    dist.recv(torch.ones(1), 0, tag=2)
    """, _INIT + """
if dist.get_rank() == 0:
    dist.send(torch.ones(1), 1, tag=1)
elif dist.get_rank() == 1:
    dist.recv(torch.ones(1), 0, tag=1)
    """),
    "gradients that are reduced past the wrapper": ("RW402", _PAST.replace("REDUCED", "torch.ones(1)"), _PAST.replace("REDUCED", "p.grad")),
    "a name that one rank alone may change": ("RW601", _INIT + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--name", default="run")
args = parser.parse_args()
if dist.get_rank() == 0:
    args.name = args.name + "_0"
torch.save([1], f"{args.name}.pt")
    """, _INIT + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--name", default="run")
args = parser.parse_args()
args.name = f"{args.name}_{dist.get_rank()}"
torch.save([1], f"{args.name}.pt")
    """),
    "a part of the batches on one rank": ("RW109", _TURNS.replace("TAKEN", "itertools.islice(loader, 3)"), _TURNS.replace("TAKEN", "tqdm.tqdm(loader)")),
    "a part of the batches, or all": ("RW109", _TURNS.replace("in batches", "in itertools.islice(loader, 3) if dist.get_rank() == 0 else loader"), _TURNS.replace("in batches", "in tqdm.tqdm(loader) if dist.get_rank() == 0 else loader")),
    "a loss that a sum has made": ("RW409", _SUMMED.replace("REDUCED", "own"), _SUMMED.replace("REDUCED", "torch.distributed.nn.functional.all_reduce(own)")),
    "a loss under a hook that may sum": ("RW409", _SUMMED.replace("REDUCED", "own"), _SUMMED.replace("REDUCED", "own").replace("own =", "model.register_comm_hook(None, hook)\nown =")),
    "a replay that all ranks fill together": ("RW401", _REPLAY.replace("GATHERED", "fresh"), _REPLAY.replace("GATHERED", "part")),
}  # fmt: skip


@pytest.mark.parametrize("name", _PAIRS)
def test_the_wrong_one_is_told_and_its_neighbour_is_left_alone(name: str) -> None:
    """Two texts that look alike, and only one of them is wrong."""
    rule_id, wrong, neighbour = _PAIRS[name]
    assert _is_told(rule_id, wrong)
    assert not _is_told(rule_id, neighbour)
