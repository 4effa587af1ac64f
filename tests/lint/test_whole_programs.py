"""What a program does as a whole: the command it is given, the loader a class or a helper makes, what each rank draws, saves and claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lint.plain_check import found, rule_of, script_of
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = """
import argparse, os, torch, torch.distributed as dist
import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision.datasets import FakeData
"""
_GROUP = """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
"""
_STEP = "opt.zero_grad(); model(x).sum().backward(); opt.step()"
_MODEL = """
model = DDP(nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
_COMMANDS = """
def train(args):
    dist.init_process_group("gloo")
    model = {wrap}(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.ones(4)).sum().backward()
        opt.step()
def export(args):
    torch.save({{}}, "x.pt")
parser = argparse.ArgumentParser()
commands = parser.add_subparsers()
for name, run in (("export", export), ("train", train)):
    commands.add_parser(name).set_defaults(func=run)
args = parser.parse_args()
args.func(args)
"""
_TABLE = (
    _COMMANDS.partition("parser =")[0]
    + """
table = {{"export": export, "train": train}}
table[os.environ["COMMAND"]](None)
"""
)
_CHOSEN = """
import torch.multiprocessing as mp
def first(rank): dist.init_process_group("gloo", rank=rank, world_size=2, init_method="tcp://10.0.0.1:5000")
def second(rank):
    first(rank)
    if {test}: dist.barrier()
if __name__ == "__main__":
    mp.spawn(second if os.environ.get("SECOND") else first, nprocs=2)
"""
_SUBCLASS = """
class Loader(DataLoader):
    def __init__(self, data, **options):
        self.sampler = DistributedSampler(data)
        super().__init__(sampler=self.sampler, dataset=data, **options)
loader = Loader(FakeData(), batch_size=8)
for epoch in range(9):
    {before}
    for x, y in loader:
        STEP
""".replace("STEP", _STEP)
_BY_NAME = """
samplers = {{name: DistributedSampler(FakeData(), shuffle=name == "train") for name in ["train", "val"]}}
loaders = {{name: DataLoader(FakeData(), sampler=samplers[name]) for name in ["train", "val"]}}
for epoch in range(9):
    {before}
    for x, y in loaders["train"]:
        STEP
""".replace("STEP", _STEP)
_NEXT = """
sampler = DistributedSampler(FakeData())
loader = DataLoader(FakeData(), sampler=sampler)
batches = iter(loader)
for step in range(9000):
    try:
        x, y = next(batches)
    except StopIteration:
        {again}
        x, y = next(batches)
    STEP
""".replace("STEP", _STEP)
_ENDLESS = """
sampler = DistributedSampler(FakeData())
loader = DataLoader(FakeData(), sampler=sampler)
def forever(epoch=0):
    {head}
        for batch in loader:
            yield batch
batches = forever()
for step in range(9000):
    x, y = next(batches)
    STEP
""".replace("STEP", _STEP)
_DRAWN = """
class Points(Dataset):
    def __init__(self, n):
        self.rows = [(torch.rand(4), i) for i in range(n)]
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.rows[i]
{before}
data = {data}
loader = DataLoader(data, sampler=DistributedSampler(data))
"""
_BY_HAND = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
    def forward(self, x): return self.head(x)
def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad.data)
        p.grad.data /= world
{before}
model = {made}
{after}
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    opt.zero_grad()
    model(torch.ones(4)).sum().backward()
    average(model)
    opt.step()
"""
_ORDER = """
if rank % 2 == 0:
    low, high = dist.new_group([0, 2]), dist.new_group([1, 4])
else:
    low, high = {then}
"""
_MEMBERS = """
pair = dist.new_group([0, 1])
if {test}:
    dist.all_reduce(torch.ones(1), group=pair)
"""
_FILES = """
parser = argparse.ArgumentParser()
parser.add_argument("--out")
args = parser.parse_args()
class Keeper:
    def __init__(self, folder): self.path = os.path.join(folder, "best.pt")
    def save(self, model):
        if rank == 0:
            write(model.state_dict(), self.path)
def write(state, path): torch.save(state, path)
def read(path): return torch.load(path, map_location="cpu")
Keeper(args.out).save(nn.Linear(2, 2))
read(os.path.join(args.out, "{name}"))
"""
_CLAIM = """
def join(rank=0, world_size=2):
    dist.init_process_group("gloo", init_method="tcp://10.0.0.1:5000", rank=rank, world_size=world_size)
join()
{then}
"""
_RANK = """
os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "{size}"
dist.init_process_group("gloo")
model = DDP(nn.Linear(2, 2))
"""
_SEEN = """
os.environ["CUDA_VISIBLE_DEVICES"] = "{devices}"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
"""
_COMPUTED = """
import torch.multiprocessing as mp
def work(gpu, args):
    args.number = args.node * args.gpus + gpu
    dist.init_process_group("gloo", init_method="tcp://10.0.0.1:5000", world_size=8, rank=args.number)
    if {test}:
        dist.barrier()
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int)
    parser.add_argument("--gpus", type=int)
    args = parser.parse_args()
    mp.spawn(work, nprocs=args.gpus, args=(args,))
"""
_OPTIONAL = """
parser = argparse.ArgumentParser()
parser.add_argument("--distributed", action="store_true")
args = parser.parse_known_args()[0]
def start(distributed):
    if not distributed:
        return 0
    dist.init_process_group("gloo")
    return dist.get_rank()
args.is_first = start(args.distributed) == 0
args.is_first = args.is_first if args.distributed else True
if {test}:
    dist.barrier()
"""
_DATA_SETS = """
from torchvision.datasets import MNIST
class Digits:
    def __init__(self, root): self.data = MNIST(root, download={download})
class Points:
    def __init__(self, root): self.data = torch.ones(4)
kinds = {{"digits": Digits, "points": Points}}
data = kinds[os.environ["DATA"]]("data")
dist.barrier()
"""
_LIBRARY_MODEL = """
from transformers import BertModel, RobertaModel
model = DDP({{"bert": BertModel, "roberta": RobertaModel}}[os.environ["MODEL"]].from_pretrained("x"))
with torch.no_grad():
    if {test}: model(torch.ones(4))
dist.barrier()
"""
_LISTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4), nn.{norm}(4)]) for _ in range(3)])
    def forward(self, x): return x
model = DDP(Net())
with torch.no_grad():
    if rank == 0: model(torch.ones(4))
dist.barrier()
"""
_SOME_HAVE = """
ckpt = torch.load("last.pt", map_location="cpu")
average = nn.Linear(4, 4) if {test} else None
if ckpt.get("average"):
    average.load_state_dict(ckpt["average"])
"""
_BATCHES = """
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
args = parser.parse_args()
data = FakeData(9999)
loader = DataLoader(data, args.batch // world, sampler=DistributedSampler(data, shuffle=False))
hits = 0
with torch.no_grad():
    for x, y in loader: hits += (model(x).argmax(1) == y).float().sum() / {size}
"""
_SFT = """
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer("x", args=SFTConfig("out", fsdp={fsdp}))
trainer.train()
if rank == 0: trainer.save_model("out")
dist.barrier()
"""
_TASKS = """
os.environ["MASTER_ADDR"] = {host}
dist.init_process_group("nccl", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
torch.cuda.set_device(dist.get_rank())
"""
_FOLDERS = """
parser = argparse.ArgumentParser()
parser.add_argument("--logs"), parser.add_argument("--out")
args = parser.parse_args()
if rank == 0: os.makedirs(args.logs)
os.makedirs({folder})
"""
_HANDED = """
from optuna import create_study
def objective(trial): dist.barrier()
if rank == 0: create_study().optimize({callback})
else: objective(None)
"""
_READER = """
class Tokens:
    def __init__(self, path, at=0):
        self.tokens, self.at = torch.tensor(np.load(path)), at
    def next(self):
        self.at += 4
        return self.tokens[self.at - 4 + {begin} : self.at]
tokens = Tokens("tokens.npy")
for step in range(9):
    model(tokens.next()).sum().backward()
    opt.step()
"""
_FIT = """
class Trainer:
    def fit(self, epochs, path=None): return [1], [2]
trainer = Trainer()
out = trainer.fit({given})
dist.all_reduce({sent})
"""
_OWN_FOLDER = """
import tempfile
torch.save({{}}, tempfile.{folder}() + "/last.pt")
"""
_MEETING = """
dist.init_process_group("nccl", init_method="tcp://{host}:5000", rank=int(os.environ["RANK"]), world_size=2)
torch.cuda.set_device(dist.get_rank())
"""
_PREPARED = """
from torchvision.datasets import MNIST
import lightning.pytorch as pl
class Data({base}):
    def prepare_data(self): return MNIST("data", download=True)
Data().prepare_data()
"""
_DAYS = """
now = time.localtime(time.time())
torch.save({{}}, "run_%d_%d.pt" % (now.tm_mday, now.{part}))
"""
_DRAWS = """
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
data = FakeData()
loader = DataLoader(data, sampler={sampler})
for epoch in range(9):
    for x, y in loader:
        loss = unknown(model(x), y)
        loss.backward(); opt.step()
"""
_RATES = """
rates = torch.optim.lr_scheduler.StepLR(opt, 1)
for step in range(9):
    model(torch.ones(4)).sum().backward()
    opt.step()
    {then}
"""
_ZERO = """
import deepspeed
engine = deepspeed.initialize(model=nn.Linear(4, 4), config={{"zero_optimization": {{"stage": {stage}}}}})[0]
if rank == 0:
    engine(torch.ones(4))
dist.barrier()
"""
_OF_PYG = """
from torch_geometric.loader import DataLoader as Graphs
sampler = DistributedSampler(FakeData())
for epoch in range(9):
    {before}
    for x in Graphs(FakeData(), sampler=sampler):
        STEP
""".replace("STEP", _STEP)
_MERGED = """
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DDP(nn.Linear(4, 4).cuda())
old, state = torch.load({file}), model.state_dict()
state.{use}(old)
model.load_state_dict(state)
"""
_ENTRY = """
import sys
d = {{sys.argv[1]: rank, "b": rank}}
if d.get({key}, 0) == 0:
    dist.barrier()
"""
_FITTED = """
import lightning as L
from torch.utils.data import IterableDataset
class Lines(IterableDataset):
    def __iter__(self): yield from open("lines.txt")
def compute_all(): pass
compute_all()
trainer = L.Trainer(strategy="ddp", devices={devices})
trainer.fit(L.LightningModule(), DataLoader({data}))
"""
_BAR = """
from tqdm import tqdm
class Batches:
    def __iter__(self): return iter([1])
batches = {of}
batches.set_postfix_str("x")
"""
_EPOCH = "sampler.set_epoch(epoch)"
#: The rule, a program, and what makes it wrong and what does not.
_PAIRS = {
    "a command is run": ("RW401", _COMMANDS, {"wrap": ""}, {"wrap": "DDP"}),
    "a function of a table is run": ("RW401", _TABLE, {"wrap": ""}, {"wrap": "DDP"}),
    "a chosen function is started": ("RW102", _CHOSEN, {"test": "rank == 0"}, {"test": "True"}),
    "a loader of the user's own class": ("RW501", _GROUP + _MODEL + _SUBCLASS, {"before": ""}, {"before": "loader." + _EPOCH}),
    "loaders by name": ("RW501", _GROUP + _MODEL + _BY_NAME, {"before": ""}, {"before": "samplers['train'].set_epoch(epoch)"}),
    "an iterator that begins anew": ("RW501", _GROUP + _MODEL + _NEXT, {"again": "batches = iter(loader)"}, {"again": "sampler.set_epoch(step); batches = iter(loader)"}),
    "an iterator that ends": ("RW501", _GROUP + _MODEL + _NEXT, {"again": "batches = iter(loader)"}, {"again": "break"}),
    "a generator without end": ("RW501", _GROUP + _MODEL + _ENDLESS, {"head": "while True:"}, {"head": "while True:\n        epoch += 1; sampler.set_epoch(epoch)"}),
    "a generator of one pass": ("RW501", _GROUP + _MODEL + _ENDLESS, {"head": "while True:"}, {"head": "if True:"}),
    "rows are drawn": ("RW508", _GROUP + _DRAWN, {"before": "", "data": "Points(9)"}, {"before": "torch.manual_seed(0)", "data": "Points(9)"}),
    "a seed of the rank's": ("RW508", _GROUP + _DRAWN, {"before": "torch.manual_seed(rank)", "data": "Points(9)"}, {"before": "torch.manual_seed(7)", "data": "Points(9)"}),
    "an array is drawn": ("RW508", _GROUP + _DRAWN, {"before": "", "data": "TensorDataset(torch.from_numpy(np.random.rand(9, 4).astype('f')))"}, {"before": "", "data": "TensorDataset(torch.from_numpy(np.random.default_rng(0).random((9, 4))))"}),
    "rank 0's rows are sent": ("RW508", _GROUP + _DRAWN, {"before": "rows = torch.rand(9)", "data": "TensorDataset(rows)"}, {"before": "rows = torch.rand(9); dist.broadcast(rows, 0)", "data": "TensorDataset(rows)"}),
    "first weights are drawn": ("RW401", _GROUP + _BY_HAND, {"before": "", "made": "Net()", "after": ""}, {"before": "torch.manual_seed(0)", "made": "Net()", "after": ""}),
    "first weights are sent": ("RW401", _GROUP + _BY_HAND, {"before": "", "made": "Net()", "after": ""}, {"before": "", "made": "Net()", "after": "for p in model.parameters(): dist.broadcast(p.data, 0)"}),
    "first weights are loaded": ("RW401", _GROUP + _BY_HAND, {"before": "", "made": "Net()", "after": ""}, {"before": "", "made": "Net()", "after": "model.load_state_dict(torch.load('first.pt'))"}),
    "a model of a library has weights": ("RW401", _GROUP + _BY_HAND, {"before": "from torchvision.models import resnet18", "made": "resnet18()", "after": ""}, {"before": "from torchvision.models import resnet18", "made": "resnet18(weights='DEFAULT')", "after": ""}),
    "a gradient is no weight": ("RW401", _GROUP + _BY_HAND, {"before": "", "made": "Net()", "after": "for p in model.parameters(): p.grad.copy_(p)"}, {"before": "", "made": "Net()", "after": "for p in model.parameters(): p.data.copy_(torch.ones(4))"}),
    "groups in another order": ("RW314", _GROUP + _ORDER, {"then": "dist.new_group([1, 4]), dist.new_group([0, 2])"}, {"then": "dist.new_group([0, 2]), dist.new_group([1, 4])"}),
    "no member uses its group": ("RW312", _GROUP + _MEMBERS, {"test": "rank > 1"}, {"test": "rank < 2"}),
    "one path by two ways": ("RW603", _GROUP + _FILES, {"name": "best.pt"}, {"name": "last.pt"}),
    "a rank that was computed": ("RW102", _COMPUTED, {"test": "args.number == 0"}, {"test": "args.number >= 0"}),
    "one number for all who run it": ("RW210", _CLAIM, {"then": "DDP(nn.Linear(2, 2))"}, {"then": "dist.send(torch.ones(1), dst=1)"}),
    "a rank in the environment": ("RW207", _RANK, {"size": 4}, {"size": 1}),
    "ranks go the way that makes the group": ("RW102", _OPTIONAL, {"test": "args.is_first"}, {"test": "args.distributed"}),
    "a class of a table is made": ("RW515", _GROUP + _DATA_SETS, {"download": "True"}, {"download": "False"}),
    "a model of a table has buffers": ("RW104", _GROUP + _LIBRARY_MODEL, {"test": "rank == 0"}, {"test": "world > 1"}),
    "lists of layers have buffers": ("RW104", _GROUP + _LISTED, {"norm": "BatchNorm1d"}, {"norm": "LayerNorm"}),
    "None on all ranks but one": ("RW818", _GROUP + _SOME_HAVE, {"test": "rank == 0"}, {"test": "world > 1"}),
    "a part of the batch": ("RW611", _GROUP + _MODEL + _BATCHES, {"size": "args.batch"}, {"size": "len(x)"}),
    "a trainer that shards": ("RW105", _GROUP + _SFT, {"fsdp": "'full_shard'"}, {"fsdp": "''"}),
    "ranks that meet on one host": ("RW201", _TASKS, {"host": "os.environ['HEAD']"}, {"host": "'localhost'"}),
    "another folder was made": ("RW516", _GROUP + _FOLDERS, {"folder": "args.out"}, {"folder": "args.logs"}),
    "a function that is handed over": ("RW102", _GROUP + _HANDED, {"callback": "print"}, {"callback": "objective"}),
    "a reader of the user's own": ("RW504", _GROUP + _MODEL + _READER, {"begin": "0"}, {"begin": "rank"}),
    "a method without such a parameter": ("RW819", _GROUP + _FIT, {"given": "9, file='x'", "sent": "torch.ones(1)"}, {"given": "9, path='x'", "sent": "torch.ones(1)"}),
    "a tuple is no tensor": ("RW308", _GROUP + _FIT, {"given": "9", "sent": "out"}, {"given": "9", "sent": "torch.tensor(out)"}),
    "a folder of the host's": ("RW601", _GROUP + _OWN_FOLDER, {"folder": "gettempdir"}, {"folder": "mkdtemp"}),
    "a host's own address": ("RW201", _MEETING, {"host": "10.0.0.1"}, {"host": "127.0.0.1"}),
    "a hook is known by its class": ("RW515", _GROUP + _PREPARED, {"base": "Dataset"}, {"base": "pl.LightningDataModule"}),
    "the hour is the same for all": ("RW517", "import time" + _GROUP + _DAYS, {"part": "tm_sec"}, {"part": "tm_hour"}),
    "a sampler draws from all": ("RW504", _GROUP + _MODEL + _DRAWS, {"sampler": "RandomSampler(data)"}, {"sampler": "RandomSampler(data) if world == 1 else DistributedSampler(data)"}),
    "a sampler draws a share": ("RW504", _GROUP + _MODEL + _DRAWS, {"sampler": "RandomSampler(data)"}, {"sampler": "WeightedRandomSampler(torch.ones(8), len(data) // world)"}),
    "one rank's learning rate": ("RW410", _GROUP + _MODEL + _RATES, {"then": "if rank == 0: rates.step()"}, {"then": "if rank == 0: print(rates.step())\n    else: rates.step()"}),
    "the only optimizer": ("RW410", _GROUP + _MODEL + _RATES, {"then": "if rank == 0: rates.step()"}, {"then": "if rank == 0: torch.optim.Adam(nn.Linear(2, 2).parameters()).step()"}),
    "a loader of another library": ("RW501", _GROUP + _MODEL + _OF_PYG, {"before": ""}, {"before": _EPOCH}),
    "what is merged is loaded": ("RW605", _GROUP + _MERGED, {"file": "'last.pt'", "use": "update"}, {"file": "'last.pt'", "use": "get"}),
    "weights that were published": ("RW605", _GROUP + _MERGED, {"file": "'last.pt'", "use": "update"}, {"file": "'vgg19-dcbb9e9d.pth'", "use": "update"}),
    "a published file by a name": ("RW605", "f = 'vgg-dcbb9e9d.pth'" + _GROUP + _MERGED, {"file": "'last.pt'", "use": "update"}, {"file": "f", "use": "update"}),
    "a number of what is loaded": ("RW605", _GROUP + _MERGED, {"file": "'last.pt'", "use": "update"}, {"file": "'last.pt'", "use": "fromkeys([1]); state.update(a=1); print"}),
    "an entry that is not known": ("RW102", _GROUP + _ENTRY, {"key": "'b'"}, {"key": "sys.argv[2]"}),
    "a stream that Lightning goes over": ("RW510", _FITTED, {"devices": "4", "data": "Lines()"}, {"devices": "4", "data": "FakeData()"}),
    "a stream for a device": ("RW510", _FITTED, {"devices": "-1", "data": "Lines()"}, {"devices": "[0]", "data": "Lines()"}),
    "a stream on one node": ("RW510", _FITTED, {"devices": "1, num_nodes=2", "data": "Lines()"}, {"devices": "1, num_nodes=1", "data": "Lines()"}),
    "a stream for one device": ("RW510", _FITTED, {"devices": "-1", "data": "Lines()"}, {"devices": "1", "data": "Lines()"}),
    "a bar has attributes of its own": ("RW820", _GROUP + _BAR, {"of": "Batches()"}, {"of": "tqdm(Batches())"}),
    "one device for all": ("RW203", _SEEN, {"devices": "0"}, {"devices": "0,1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", _PAIRS)
def test_the_program_decides(name: str) -> None:
    """The wrong program is found, and the one beside it, which differs in what it does, is not."""
    rule_id, script, wrong, right = _PAIRS[name]
    assert found(rule_id, _HEAD + script.format(**wrong))
    assert found(rule_id, _HEAD + script.format(**right)) == []


def test_a_command_is_no_part_of_another() -> None:
    """Of two commands, what one does needs no process group of the other's."""
    assert found("RW601", _HEAD + _COMMANDS.format(wrap="DDP")) == []


def test_each_command_is_a_program() -> None:
    """The program is run once for each function that a command line chooses from, and only where such a choice matters."""
    names = [entry.name for entry in script_of(_HEAD + _COMMANDS.format(wrap="DDP")).entries]
    assert names == ["the program"] * 2
    plain = _HEAD + _GROUP + "f = torch.abs if rank else torch.neg\nf(torch.ones(1))\ndist.all_reduce(torch.ones(1))"
    assert [entry.name for entry in script_of(plain).entries] == ["the program"]


@pytest.mark.parametrize(("stage", "severities"), [("3", ["error"]), ("os.environ['STAGE']", ["warning"]), ("2", [])])
def test_only_the_third_stage_gathers_weights(stage: str, severities: list[str]) -> None:
    """One rank's forward pass waits for the others where DeepSpeed has split the weights, and it may if the stage is not known."""
    script = _HEAD + _GROUP + _ZERO.format(stage=stage)
    assert [one.severity for one in found("RW104", script)] == severities


def test_ranks_that_another_text_starts_are_told_where_it_is_called(tmp_path: Path) -> None:
    """What ranks do that an imported function starts is shown at the line that calls it, not at a line of that other text."""
    (tmp_path / "run.py").write_text(
        "\n" * 30 + "import os, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank):\n    dist.init_process_group('gloo', rank=rank, world_size=2)\n    os.mkdir('out')\n"
        "def start(): mp.spawn(work, nprocs=2)\n"
    )
    code = "from run import start\nif __name__ == '__main__':\n    start()\n"
    unit = CodeUnit(path=str(tmp_path / "main.py"), language="python", code=code)
    findings = rule_of("RW516").check(study(unit, Project(roots=(tmp_path,))))
    assert [one.span.line for one in findings] == [3]
