"""Data, samplers and seeds: mistakes in many forms are found, and the legal forms that look alike are not."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.running.check import check_unit

if TYPE_CHECKING:
    from pathlib import Path

RULES = [rule for rule in registry.all_rules() if rule.id.startswith("RW5")]
HEAD = """\
import os, time, uuid, random
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset, random_split
import torch.multiprocessing as mp
import torchvision
dist.init_process_group("gloo")
net = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
"""
STEP = "opt.zero_grad(); net(x).sum().backward(); opt.step()"
#: A data set whose samples are on the disk.
IMAGES = "torchvision.datasets.ImageFolder('/data')"


def found(code: str, head: str = HEAD) -> set[str]:
    text = head + textwrap.dedent(code).replace("STEP", STEP).replace("IMAGES", IMAGES)
    findings = check_unit(CodeUnit(path="train.py", language="python", code=text), Project(), RULES)
    return {f"{one.rule}:{one.severity[0]}" for one in findings}


SAMPLED = """\
ds = IMAGES
s = DistributedSampler(ds)
dl = DataLoader(ds, 8, sampler=s)
"""
BAD = {
    # set_epoch
    "never": (SAMPLED + "for e in range(9):\n    for x in dl:\n        STEP\n", "RW501:e"),
    "while": (SAMPLED + "e = 0\nwhile e < 9:\n    for i, x in enumerate(dl):\n        STEP\n    e += 1\n", "RW501:e"),
    "zip": (SAMPLED + "for e in range(9):\n    for i, x in zip(range(5), dl):\n        STEP\n", "RW501:e"),
    "tqdm": ("from tqdm import tqdm\n" + SAMPLED + "for e in tqdm(range(9)):\n    for x in tqdm(dl):\n        STEP\n", "RW501:e"),
    "keyword-shuffle": (SAMPLED.replace("(ds)", "(ds, shuffle=True, seed=3)") + "for e in range(9):\n    for x in dl:\n        STEP\n", "RW501:e"),
    "batch-sampler": ("ds = IMAGES\ndl = DataLoader(ds, batch_sampler=BatchSampler(DistributedSampler(ds), 8, True))\nfor e in range(9):\n    for x in dl:\n        STEP\n", "RW501:e"),
    "in-functions": (SAMPLED + "def one(dl):\n    for x in dl:\n        STEP\ndef many(dl, n):\n    for e in range(n):\n        one(dl)\nmany(dl, 9)\n", "RW501:e"),
    "in-class": (
        """
        class T:
            def __init__(self):
                self.ds = IMAGES
                self.s = DistributedSampler(self.ds)
                self.dl = DataLoader(self.ds, 8, sampler=self.s)
            def fit(self):
                for e in range(5):
                    for x in self.dl:
                        STEP
        T().fit()
        """,
        "RW501:e",
    ),
    "other-sampler": (SAMPLED + "v = DistributedSampler(ds, shuffle=False)\nfor e in range(9):\n    v.set_epoch(e)\n    for x in dl:\n        STEP\n", "RW501:e"),
    "rank-0-only": (SAMPLED + "for e in range(9):\n    if dist.get_rank() == 0:\n        s.set_epoch(e)\n    for x in dl:\n        STEP\n", "RW501:e"),
    "before": (SAMPLED + "s.set_epoch(1)\nfor e in range(9):\n    for x in dl:\n        STEP\n", "RW502:e"),
    "constant": (SAMPLED + "for e in range(9):\n    s.set_epoch(0)\n    for x in dl:\n        STEP\n", "RW502:e"),
    "inside": (SAMPLED + "for e in range(9):\n    for x in dl:\n        s.set_epoch(e)\n        STEP\n", "RW502:w"),
    "behind": (SAMPLED + "for e in range(9):\n    for x in dl:\n        STEP\n    s.set_epoch(e)\n", "RW502:w"),
    # a sampler with shuffle
    # nothing splits the data
    "plain": ("dl = DataLoader(IMAGES, 8, shuffle=True)\nfor x, y in dl:\n    STEP\n", "RW504:e"),
    "plain-unshuffled": ("dl = DataLoader(IMAGES, 8)\nfor x, y in dl:\n    STEP\n", "RW504:e"),
    "own-class": (
        """
        class D(Dataset):
            def __init__(self, root): self.files = sorted(os.listdir(root))
            def __len__(self): return len(self.files)
            def __getitem__(self, i): return torch.load(self.files[i])
        for e in range(3):
            for i, x in enumerate(DataLoader(D("/data"), batch_size=4, shuffle=True)):
                STEP
        """,
        "RW504:e",
    ),
    "not-prepared": (
        """
        from accelerate import Accelerator
        acc = Accelerator()
        dl = DataLoader(IMAGES, 8, shuffle=True)
        model, o = acc.prepare(torch.nn.Linear(4, 1), opt)
        for x in dl:
            acc.backward(model(x).sum())
            o.step()
        """,
        "RW504:e",
    ),
    "rank-0-share": ("ds = IMAGES\nDistributedSampler(ds, dist.get_world_size(), 0)\n", "RW505:e"),
    "one-replica": ("ds = IMAGES\nDistributedSampler(ds, num_replicas=1, rank=0)\n", "RW505:e"),
    "swapped": ("ds = IMAGES\nDistributedSampler(ds, dist.get_rank(), dist.get_world_size())\n", "RW505:e"),
    "local-share": ("ds = IMAGES\nDistributedSampler(ds, rank=int(os.environ['LOCAL_RANK']), num_replicas=dist.get_world_size())\n", "RW505:w"),
    "twice": ("from accelerate import Accelerator\nacc = Accelerator()\n" + SAMPLED + "dl = acc.prepare(dl)\n", "RW506:w"),
    # seeds
    "seed-rank": ("r = dist.get_rank()\nDistributedSampler(IMAGES, seed=r * 100)\n", "RW507:e"),
    "seed-env": ("DistributedSampler(IMAGES, seed=7 + int(os.environ['RANK']))\n", "RW507:e"),
    "seed-time": ("DistributedSampler(IMAGES, shuffle=True, seed=int(time.time()))\n", "RW507:e"),
    "epoch-rank": ("s = DistributedSampler(IMAGES)\nfor e in range(3):\n    s.set_epoch(e + dist.get_rank())\n", "RW507:e"),
    "split-rank": ("torch.manual_seed(dist.get_rank())\na, b = random_split(IMAGES, [0.9, 0.1])\n", "RW508:e"),
    "split-unset": ("a, b = random_split(IMAGES, [0.9, 0.1])\n", "RW508:e"),
    "split-own-generator": ("a, b = random_split(IMAGES, [0.9, 0.1], torch.Generator().manual_seed(dist.get_rank()))\n", "RW508:e"),
    "sklearn": ("from sklearn.model_selection import train_test_split\na, b = train_test_split(list(range(99)), test_size=9)\n", "RW508:e"),
    "sklearn-rank": ("from sklearn.model_selection import train_test_split as tts\na, b = tts(list(range(99)), random_state=dist.get_rank())\n", "RW508:e"),
    "shuffled-files": ("files = sorted(os.listdir('d'))\nrandom.shuffle(files)\ntrain, val = files[10:], files[:10]\nDataLoader(train)\n", "RW508:e"),
    "numpy-order": ("ds = IMAGES\norder = np.random.permutation(100)\nSubset(ds, order[:80]); Subset(ds, order[80:])\n", "RW508:e"),
    "same-noise": ("torch.manual_seed(3)\nfor i in range(9):\n    x = torch.randn(8, 4)\n    STEP\n", "RW509:w"),
    "same-mask": ("random.seed(3)\nfor e in range(9):\n    for i in range(9):\n        x = torch.ones(8, 4) * random.random()\n        STEP\n", "RW509:w"),
    # streams
    "stream": ("class S(IterableDataset):\n    def __iter__(self):\n        for line in open('f'):\n            yield torch.tensor(float(line))\nfor x in DataLoader(S(), 4):\n    STEP\n", "RW510:e"),
    "stream-worker-only": (
        "class S(IterableDataset):\n    def __iter__(self):\n        w = torch.utils.data.get_worker_info()\n"
        "        for i in range(w.id, 100, w.num_workers):\n            yield torch.ones(4)\nfor x in DataLoader(S(), 4, num_workers=2):\n    STEP\n",
        "RW510:e",
    ),
    "streaming": ("from datasets import load_dataset\nds = load_dataset('c4', split='train', streaming=True).shuffle(seed=1)\nfor x in DataLoader(ds, 4):\n    STEP\n", "RW510:e"),
    "workers": ("class S(IterableDataset):\n    def __iter__(self):\n        for i in range(dist.get_rank(), 99, dist.get_world_size()):\n            yield torch.ones(4)\nDataLoader(S(), 4, num_workers=4)\n", "RW511:e"),
    # evaluation and lengths
    "padded": (
        "ds = IMAGES\ndl = DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False))\nn = torch.zeros(1)\n"
        "with torch.inference_mode():\n    for x in dl:\n        n += net.module(x).sum()\ndist.all_reduce(n)\n",
        "RW512:w",
    ),
    # folders and downloads
    "download": ("torchvision.datasets.CIFAR10('d', download=True)\n", "RW515:e"),
    "wget": ("os.system('wget https://x.y/z.tgz')\n", "RW515:w"),
    "run-tar": ("import subprocess\nsubprocess.run(['tar', 'xf', 'z.tgz'], check=True)\n", "RW515:w"),
    "no-wait": ("if dist.get_rank() == 0:\n    torchvision.datasets.MNIST('d', download=True)\nds = torchvision.datasets.MNIST('d')\n", "RW515:e"),
    "makedirs": ("if not os.path.isdir('out'):\n    os.makedirs('out')\n", "RW516:w"),
    "mkdir": ("import pathlib\np = pathlib.Path('out')\nif not p.exists():\n    p.mkdir()\n", "RW516:w"),
    "rmtree": ("import shutil\nif os.path.exists('out'):\n    shutil.rmtree('out')\n", "RW516:w"),
    "stamp": ("d = f'runs/{time.strftime(\"%H%M%S\")}'\nos.makedirs(d, exist_ok=True)\nopen(f'{d}/{dist.get_rank()}.log', 'w')\n", "RW517:e"),
    "uuid": ("from pathlib import Path\nd = Path('runs') / str(uuid.uuid4())\nd.mkdir()\ntorch.save(1, d / 'x.pt')\n", "RW517:e"),
    # waiting and workers
}  # fmt: skip

LOOP = "for e in range(9):\n    s.set_epoch(e)\n    for x in dl:\n        STEP\n"
LEGAL = {
    "resumed-epoch": (
        "r = int(os.environ['LOCAL_RANK'])\ns = DistributedSampler(IMAGES)\n"
        "first = torch.load('c.pt', map_location=f'cuda:{r}')['epoch'] if r is not None else 0\n"
        "for e in range(first, 9):\n    s.set_epoch(e)\n    for x in DataLoader(IMAGES, 4, sampler=s):\n        STEP\n"
    ),
    "called": SAMPLED + LOOP,
    "by-loader": SAMPLED + "for e in range(9):\n    dl.sampler.set_epoch(e)\n    for x in dl:\n        STEP\n",
    "short-circuit": SAMPLED + "for e in range(9):\n    s and s.set_epoch(e)\n    for x in dl:\n        STEP\n",
    "getattr": SAMPLED + "for e in range(9):\n    f = getattr(dl.sampler, 'set_epoch', None)\n    if f is not None:\n        f(e)\n    for x in dl:\n        STEP\n",
    "helper": SAMPLED + "def tell(o, e):\n    if hasattr(o, 'set_epoch'):\n        o.set_epoch(e)\nfor e in range(9):\n    tell(dl.sampler, e)\n    for x in dl:\n        STEP\n",
    "hidden-helper": "from mine import begin\n" + SAMPLED + "for e in range(9):\n    begin(dl, e)\n    for x in dl:\n        STEP\n",
    "next-epoch": SAMPLED + "for e in range(9):\n    for x in dl:\n        STEP\n    s.set_epoch(e + 1)\n",
    "one-epoch": SAMPLED + "for x in dl:\n    STEP\n",
    "range-1": SAMPLED + "for e in range(1):\n    for x in dl:\n        STEP\n",
    "unshuffled": SAMPLED.replace("(ds)", "(ds, shuffle=False)") + "for e in range(9):\n    for x in dl:\n        STEP\n",
    "new-each-epoch": "ds = IMAGES\nfor e in range(9):\n    s = DistributedSampler(ds, seed=e)\n    for x in DataLoader(ds, 8, sampler=s):\n        STEP\n",
    "validation": SAMPLED + "for e in range(9):\n    with torch.no_grad():\n        for x in dl:\n            net.module(x)\n",
    "two-loaders": SAMPLED + "for d in (dl, dl):\n    for x in d:\n        STEP\n",
    "other-object": SAMPLED + "for e in range(9):\n    cb.set_epoch(e)\n    for x in dl:\n        STEP\n",
    "shuffle-false": "ds = IMAGES\nDataLoader(ds, 8, shuffle=False, sampler=DistributedSampler(ds))\n",
    "is-none": "ds = IMAGES\ns = DistributedSampler(ds) if cfg.ddp else None\nDataLoader(ds, 8, shuffle=(s is None), sampler=s)\n",
    "table-either": "ds = IMAGES\nkw = {}\nif cfg.ddp:\n    kw['sampler'] = DistributedSampler(ds)\nelse:\n    kw['shuffle'] = True\nDataLoader(ds, **kw)\n",
    "table-pop": "ds = IMAGES\nkw = dict(shuffle=True)\nif cfg.ddp:\n    kw.pop('shuffle')\n    kw['sampler'] = DistributedSampler(ds)\nDataLoader(ds, **kw)\n",
    "none": "DataLoader(IMAGES, 8, shuffle=True, sampler=None)\n",
    "batches": "ds = IMAGES\nDataLoader(ds, batch_sampler=BatchSampler(DistributedSampler(ds), 8, True), num_workers=2)\n",
    "subset": "ds = IMAGES\nfor x in DataLoader(Subset(ds, range(dist.get_rank(), 800, dist.get_world_size())), 8, shuffle=True):\n    STEP\n",
    "files": "files = sorted(os.listdir('d'))[dist.get_rank()::dist.get_world_size()]\nclass D(Dataset):\n    def __init__(self, f): self.f = f\n    def __getitem__(self, i): return self.f[i]\nfor x in DataLoader(D(files), 4, shuffle=True):\n    STEP\n",
    "asks-itself": "class D(Dataset):\n    def __init__(self): self.r = dist.get_rank()\n    def __getitem__(self, i): return torch.load(f'{i}.{self.r}')\nfor x in DataLoader(D(), 4):\n    STEP\n",
    "made-up": "class D(Dataset):\n    def __len__(self): return 99\n    def __getitem__(self, i): return torch.randn(4)\nfor x in DataLoader(D(), 4):\n    STEP\n",
    "loop-shares": "w, r = dist.get_world_size(), dist.get_rank()\nfor i, x in enumerate(DataLoader(IMAGES, 8)):\n    if i % w != r:\n        continue\n    STEP\n",
    "choice": "ds = IMAGES\nif cfg.distributed:\n    dl = DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False))\nelse:\n    dl = DataLoader(ds, 8, shuffle=True)\nfor x in dl:\n    STEP\n",
    "unknown-data": "from mine import build\nfor x in DataLoader(build(), 8):\n    STEP\n",
    "unknown-loader": "from mine import shard\ndl = shard(DataLoader(IMAGES, 8, shuffle=True))\nfor x in dl:\n    STEP\n",
    "evaluation": "with torch.no_grad():\n    for x in DataLoader(IMAGES, 8):\n        net.module(x)\n",
    "prepared": "from accelerate import Accelerator\nacc = Accelerator()\ndl = DataLoader(IMAGES, 8, shuffle=True)\nm, dl = acc.prepare(torch.nn.Linear(4, 1), dl)\nfor e in range(3):\n    for x in dl:\n        acc.backward(m(x).sum())\n",
    "mesh": "from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cuda', (8,))\nfor x in DataLoader(IMAGES, 8):\n    STEP\n",
    "share": "DistributedSampler(IMAGES, num_replicas=dist.get_world_size(), rank=dist.get_rank(), seed=3)\n",
    "share-unknown": "DistributedSampler(IMAGES, num_replicas=cfg.replicas, rank=cfg.place)\n",
    "seed-sent": "t = torch.tensor([int(time.time())])\ndist.broadcast(t, 0)\nDistributedSampler(IMAGES, seed=int(t.item()))\n",
    "split-generator": "torch.manual_seed(dist.get_rank())\nrandom_split(IMAGES, [0.9, 0.1], generator=torch.Generator().manual_seed(1))\n",
    "split-seeded": "torch.manual_seed(1)\nrandom_split(IMAGES, [0.9, 0.1])\n",
    "split-helper": "def seed_all(n):\n    torch.manual_seed(n)\n    random.seed(n)\nseed_all(4)\nrandom_split(IMAGES, [0.9, 0.1])\n",
    "split-main": "if dist.get_rank() == 0:\n    torch.save(random_split(IMAGES, [0.9, 0.1]), 'split')\ndist.barrier()\n",
    "sklearn-state": "from sklearn.model_selection import train_test_split\ntrain_test_split(list(range(9)), random_state=0)\n",
    "shuffle-only": "names = ['a', 'b']\nrandom.shuffle(names)\nprint(names[:1])\n",
    "own-noise": "torch.manual_seed(3 + dist.get_rank())\nfor i in range(9):\n    x = torch.randn(8, 4)\n    STEP\n",
    "unseeded-noise": "for i in range(9):\n    x = torch.randn(8, 4)\n    STEP\n",
    "stream-rank": "class S(IterableDataset):\n    def __iter__(self):\n        for i in range(dist.get_rank(), 99, dist.get_world_size()):\n            yield torch.ones(4)\nfor x in DataLoader(S(), 4):\n    STEP\n",
    "stream-both": "class S(IterableDataset):\n    def __init__(self, rank, world): self.rank, self.world = rank, world\n    def __iter__(self):\n        w = torch.utils.data.get_worker_info()\n        for i in range(self.rank * w.num_workers + w.id, 99, self.world * w.num_workers):\n            yield torch.ones(4)\nfor x in DataLoader(S(dist.get_rank(), dist.get_world_size()), 4, num_workers=2):\n    STEP\n",
    "stream-files": "class S(IterableDataset):\n    def __init__(self, path): self.path = path\n    def __iter__(self):\n        yield from open(self.path)\nfor x in DataLoader(S(f'part{dist.get_rank()}'), 4):\n    STEP\n",
    "stream-random": "class S(IterableDataset):\n    def __iter__(self):\n        while True:\n            yield torch.randn(4)\nfor x in DataLoader(S(), 4):\n    STEP\n",
    "streaming-split": "from datasets import load_dataset\nfrom datasets.distributed import split_dataset_by_node\nds = split_dataset_by_node(load_dataset('c4', split='train', streaming=True), dist.get_rank(), dist.get_world_size())\nfor x in DataLoader(ds, 4):\n    STEP\n",
    "streaming-shard": "from datasets import load_dataset\nds = load_dataset('c4', split='train', streaming=True).shard(dist.get_world_size(), dist.get_rank())\nfor x in DataLoader(ds, 4):\n    STEP\n",
    "no-reduce": "ds = IMAGES\nwith torch.no_grad():\n    for x in DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False)):\n        net.module(x)\n",
    "even": "ds = TensorDataset(torch.zeros(800, 4))\nn = torch.zeros(1)\nwith torch.no_grad():\n    for x in DataLoader(ds, 8, sampler=DistributedSampler(ds, shuffle=False)):\n        n += net.module(x).sum()\ndist.all_reduce(n)\n",
    "plenty": "ds = TensorDataset(torch.zeros(6400, 4))\nDataLoader(ds, 16, sampler=DistributedSampler(ds, drop_last=True), drop_last=True)\n",
    "collate-pads": "def c(b):\n    return torch.stack([x['a'] for x in b])\nds = IMAGES\nDataLoader(ds, 4, sampler=DistributedSampler(ds), collate_fn=c)\n",
    "last-batch": SAMPLED.replace("(ds)", "(ds, shuffle=False)") + "for x in dl:\n    if x.shape[0] < 8:\n        continue\n    STEP\n",
    "download-first": "r = dist.get_rank()\nif r != 0:\n    dist.barrier()\nds = torchvision.datasets.MNIST('d', download=True)\nif r == 0:\n    dist.barrier()\n",
    "download-then": "if int(os.environ['LOCAL_RANK']) == 0:\n    torchvision.datasets.MNIST('d', download=True)\ndist.barrier()\nds = torchvision.datasets.MNIST('d', download=True)\n",
    "download-own": "torchvision.datasets.MNIST(f'd{dist.get_rank()}', download=True)\n",
    "download-lock": "from filelock import FileLock\nwith FileLock('l'):\n    torchvision.datasets.MNIST('d', download=True)\n",
    "hub": "from datasets import load_dataset\nload_dataset('imdb')\n",
    "exist-ok": "os.makedirs('out', exist_ok=True)\n",
    "rank-folder": "os.makedirs(f'out/{dist.get_rank()}')\n",
    "main-folder": "if dist.get_rank() == 0:\n    os.makedirs('out')\ndist.barrier()\n",
    "caught": "try:\n    os.mkdir('out')\nexcept FileExistsError:\n    pass\n",
    "rmtree-ignores": "import shutil\nshutil.rmtree('out', ignore_errors=True)\n",
    "main-stamp": "if dist.get_rank() == 0:\n    d = f'runs/{time.time()}'\n    os.makedirs(d, exist_ok=True)\n    torch.save(1, f'{d}/x')\n",
    "sent-stamp": "n = [str(uuid.uuid4())]\ndist.broadcast_object_list(n)\ntorch.save(1, f'{n[0]}/{dist.get_rank()}')\n",
    "timing": "t = time.time()\nnet(torch.ones(1, 4)).sum().backward()\ntorch.save({'s': time.time() - t}, f'{dist.get_rank()}.pt')\n",
    "scratch": "import tempfile\nd = tempfile.mkdtemp()\ntorch.save(1, f'{d}/{time.time()}.pt')\n",
    "cuda-in-loop": "for x in DataLoader(TensorDataset(torch.ones(64, 4)), 4, num_workers=2, sampler=DistributedSampler(range(64), shuffle=False)):\n    x = x[0].cuda()\n    STEP\n",
    "cuda-spawned": "class D(Dataset):\n    def __getitem__(self, i):\n        return torch.ones(3).cuda()\nDataLoader(D(), 4, num_workers=4, multiprocessing_context='spawn')\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_found(name: str) -> None:
    """Each form of a mistake gives its rule, as bad as it is, and no other error."""
    code, expected = BAD[name]
    got = found(code)
    assert expected in got
    assert {one for one in got if one.endswith(":e")} <= {expected}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_forms_are_left_alone(name: str) -> None:
    """What only looks like a mistake gives no error and no warning."""
    assert {one for one in found(LEGAL[name]) if not one.endswith(":h")} == set()


def test_one_process_is_left_alone() -> None:
    """A program without a process group may shuffle, download and make folders as it likes."""
    head = "import os, torch, torchvision\nfrom torch.utils.data import DataLoader, random_split\n"
    code = "os.makedirs('out')\nds = torchvision.datasets.MNIST('d', download=True)\na, b = random_split(ds, [0.9, 0.1])\nDataLoader(a, 8, shuffle=True)\n"
    assert found(code, head) == set()


def test_process_that_starts_the_ranks_is_left_alone() -> None:
    """Before mp.spawn one process downloads, splits and makes the run's folder; in the ranks each does."""
    head = "import os, time, torch, torchvision, torch.distributed as dist, torch.multiprocessing as mp\n"
    work = "torchvision.datasets.MNIST('d', download=True)\nos.makedirs('out')\n"
    ranks = "def run(rank):\n    dist.init_process_group('gloo', rank=rank, world_size=2)\n"
    start = "if __name__ == '__main__':\n    WORK\n    mp.spawn(run, nprocs=2)\n"
    before = head + ranks + start.replace("WORK", work.replace("\n", "; ").rstrip("; "))
    inside = head + ranks + textwrap.indent(work, "    ") + start.replace("WORK", "pass")
    assert found("", before) == set()
    assert found("", inside) == {"RW515:e", "RW516:e"}


def test_data_of_another_module_is_followed(tmp_path: Path) -> None:
    """A loader made in one module, with its sampler, is known in the loop of another; the finding stands in the text that is checked."""
    (tmp_path / "feeding.py").write_text(
        "import torchvision\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "def build():\n    ds = torchvision.datasets.ImageFolder('d')\n    return DataLoader(ds, 8, sampler=DistributedSampler(ds))\n"
    )
    code = (
        HEAD + "from feeding import build\ndl = build()\nfor e in range(5):\n    for x in dl:\n        " + STEP + "\n"
    )
    unit = CodeUnit(path=str(tmp_path / "train.py"), language="python", code=code)
    findings = check_unit(unit, Project(roots=(tmp_path,)), RULES)
    assert [(one.rule, one.span.line) for one in findings] == [("RW501", code.split("\n").index("dl = build()") + 1)]


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("os.makedirs('out')", "os.makedirs('out', exist_ok=True)"),
        ("os.makedirs(name='out')", "os.makedirs(name='out', exist_ok=True)"),
    ],
)
def test_edits_mend_the_line(line: str, mended: str) -> None:
    """What --fix does leaves a line that no rule minds."""
    code = HEAD + SAMPLED.replace("IMAGES", IMAGES) + line + "\n"
    (finding,) = check_unit(CodeUnit(path="train.py", language="python", code=code), Project(), RULES)
    (edit,) = finding.edits
    assert line[: edit.span.col - 1] + edit.text + line[edit.span.end_col - 1 :] == mended
    assert found("", code.replace(line, mended)) == set()
