"""Plain Python mistakes (RW801 to RW818): each is found in several forms, and similar code gives no finding."""

from __future__ import annotations

import pytest

from lint.plain_check import found, mended

_LOADER = "from torch.utils.data import DataLoader\nsome = DataLoader([1, 2], 2)\n"
BAD = {
    ("RW804", "python 2"): "def f(x): return unicode(x)",
    ("RW801", "attribute, moved to a device"): """
        class T:
            def __init__(self, m, gpu_id):
                self.gpu_id = gpu_id,
            def go(self, x): return x.to(self.gpu_id)
    """,
    ("RW801", "loader with a sampler"): """
        class T:
            def __init__(self, train_loader):
                self.train_loader = train_loader,  # the data
            def go(self):
                self.train_loader.sampler.set_epoch(0)
                for x, y in self.train_loader: pass
    """,
    ("RW801", "local that is called"): "def f(model, x):\n    net = DDP(model),\n    return net(x)",
    ("RW801", "device text"): "rank = get(),\ndevice = f'cuda:{rank}'",
    ("RW801", "device ids"): "rank = int(a),\nm = DDP(m, device_ids=[rank])",
    ("RW801", "compared with a number"): "rank = get_rank(),\nif rank == 0:\n    print()",
    ("RW801", "with an annotation"): "def f(m, r):\n    rank: int = r,\n    m.to(rank)",
    ("RW801", "a count"): "num_epochs = 3,\nfor e in range(num_epochs): pass",
    ("RW801", "a loader's batch size"): "bs = 32,\nDataLoader(d, batch_size=bs)",
    ("RW802", "super inside"): """
        from torch import nn
        class N(nn.Module):
            def __int__(self):
                super(N, self).__init__()
    """,
    ("RW802", "made with arguments"): """
        class T:
            def init(self, model): self.model = model
            def go(self): self.model()
        T(1)
    """,
    ("RW802", "a data set"): """
        from torch.utils.data import Dataset
        class D(Dataset):
            def init(self, size): self.size = size
            def __len__(self): return self.size
        D(10)
    """,
    ("RW802", "one underscore"): "class T:\n    def _init_(self, a):\n        self.a = a",
    ("RW802", "int with arguments"): "class T(Base):\n    def __int__(self, a, b):\n        self.a = a",
    (
        "RW802",
        "underscores lost twice",
    ): "from torch import nn\nclass T(nn.Module):\n    def init(self, a):\n        super().init()",
    ("RW804", "kwards"): "def f(*args, **kwards):\n    return g(*args, **kwargs)",
    ("RW804", "arg"): "def f(*arg, **kwargs):\n    return g(*args, **kwargs)",
    ("RW804", "kwarg in a nested function"): "def f(**kwarg):\n    def h(): return kwargs\n    return h",
    (
        "RW804",
        "local of another function",
    ): "def load():\n    train_set = 1\ndef prepare():\n    return train_set",
    ("RW804", "local of main"): "def main():\n    rank = 0\n    work()\ndef work():\n    print(rank)",
    ("RW804", "attribute without self"): """
        class T:
            def __init__(self): self.rank = 0
            def go(self): return rank
    """,
    ("RW804", "nowhere"): "import torch\ndef f():\n    return optimzer",
    ("RW805", "shape in a loop"): _LOADER + "for e in range(3):\n    print(next(iter(some))[0].shape[0])",
    ("RW805", "names in a loop"): _LOADER + "for e in range(3):\n    x, y = next(iter(some))\n    print(x.size(0))",
    ("RW805", "a function called in a loop"): _LOADER
    + "def show(it): print(len(next(iter(it))[0]))\nfor e in range(3): show(some)",
    (
        "RW805",
        "an iterator with a name",
    ): _LOADER + "for e in range(3):\n    it = iter(some)\n    x, y = next(it)\n    print(len(x))",
    ("RW805", "dunder next"): _LOADER + "for e in range(3):\n    n = len(iter(some).__next__()[0])",
    ("RW805", "through two methods"): _LOADER
    + """
class T:
    def __init__(self, data): self.data = data
    def _show(self): print(len(next(iter(self.data))[0]))
    def _run(self, e): self._show()
    def train(self):
        for e in range(3): self._run(e)
T(some).train()
""",
    ("RW806", "a name for the function"): """
        import torch
        from torch import nn
        net = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(1))
        loss_fn = nn.functional.cross_entropy
        loss_fn(input=net(x), target=y)
    """,
    ("RW806", "functional"): """
        import torch
        import torch.nn.functional as F
        model = torch.nn.Linear(20, 1)
        def step(x, y): return F.cross_entropy(model(x), y)
    """,
    ("RW806", "through a trainer and a tuple"): """
        import torch
        class Trainer:
            def __init__(self, model, loader):
                self.model = torch.nn.parallel.DistributedDataParallel(model.to(0), device_ids=[0])
                self.loss = torch.nn.CrossEntropyLoss()
            def batch(self, x, y):
                out = self.model(x)
                return self.loss(out, y)
        def load():
            model = torch.nn.Linear(20, out_features=1)
            return [1], model
        data, model = load()
        Trainer(model, data).batch(1, 2)
    """,
    ("RW806", "module class"): """
        import torch.nn as nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 1))
            def forward(self, x):
                x = self.body(x)
                return x
        net = Net().cuda()
        nn.CrossEntropyLoss()(net(1), 2)
    """,
    ("RW808", "no_grad"): "import torch\ntorch.no_grad()",
    ("RW808", "device, imported"): "from torch.cuda import device\ndef f(rank):\n    device(rank)",
    ("RW808", "device_index"): "import torch\ntorch.accelerator.device_index(1)",
    ("RW808", "autocast"): "from torch.amp import autocast\nautocast('cuda')",
    ("RW808", "no_sync"): "def f(ddp):\n    ddp.no_sync()",
    ("RW808", "join"): "from torch.distributed.algorithms.join import Join\ndef f(m):\n    Join([m])",
    ("RW808", "ddp's join"): "from torch.nn.parallel import DistributedDataParallel as D\nm = D(n)\nm.join()",
    ("RW809", "barrier"): "import torch.distributed as dist\ndist.barrier",
    (
        "RW809",
        "destroy, imported",
    ): "from torch import distributed\ndef f():\n    distributed.destroy_process_group",
    ("RW809", "optimizer"): "for x in y:\n    optimizer.zero_grad\n    loss.backward()",
    ("RW809", "own attribute"): "class T:\n    def f(self):\n        self.model.eval",
    ("RW809", "own function"): "def main(): pass\nif __name__ == '__main__':\n    main",
    ("RW809", "entered"): "import torch\nwith torch.no_grad:\n    pass",
    ("RW809", "made by torch.optim"): "from torch.optim import Adam\no = Adam(p)\nfor x in y:\n    o.step",
    (
        "RW809",
        "a schedule",
    ): "from torch.optim.lr_scheduler import StepLR as S\ndef f(o):\n    s = S(o, 3)\n    s.step",
    ("RW809", "no_sync"): "def f(net):\n    with net.no_sync:\n        pass",
    ("RW809", "among numbers"): "import torch.distributed as dist\nif dist.get_rank in (0, 1):\n    print()",
    ("RW809", "compared"): "import torch.distributed as dist\nif dist.get_rank == 0:\n    print()",
    ("RW809", "not"): "from torch.distributed import is_initialized\nwhile not is_initialized:\n    pass",
    ("RW809", "under a name"): "import torch.distributed as dist\nrank = dist.get_rank\nprint(rank != 0)",
    ("RW809", "counted with"): "import torch.distributed as dist\nn = 64 // dist.get_world_size",
}
LEGAL = {
    ("RW809", "a number called step"): "class O: step = 1\no = O()\no.step",
    (
        "RW809",
        "an own no_sync",
    ): "class N:\n    @property\n    def no_sync(self): ...\ndef f(net):\n    with net.no_sync: pass",
    (
        "RW809",
        "called",
    ): "import torch.distributed as dist\nif dist.is_initialized() and dist.get_rank() == 0: pass",
    (
        "RW809",
        "called by its name",
    ): "import torch.distributed as dist\nrank = dist.get_rank\nprint(rank() == 0)",
    ("RW809", "one of two"): "import torch.distributed as dist\nf = dist.get_rank\nf = 3\nprint(f == 3)",
    (
        "RW809",
        "functions compared",
    ): "import torch.distributed as dist\nassert dist.get_rank == old\nprint(dist.get_rank is None)",
    (
        "RW801",
        "parentheses",
    ): "class T:\n    def __init__(self, a):\n        self.a = (a,)\n    def f(self): self.a.b",
    ("RW801", "unpacking"): "x, = f()\nx.y",
    (
        "RW801",
        "indexed",
    ): "class T:\n    def __init__(self, a):\n        self.a = a,\n    def f(self): return self.a[0]",
    (
        "RW801",
        "iterated",
    ): "class T:\n    def __init__(self, hook):\n        self.hook = hook,\n    def f(self):\n        for h in self.hook: h()",
    ("RW801", "shape"): "shape = n,\nzeros(shape)",
    ("RW801", "joined"): "rest = x,\nall = rest + (y,)",
    ("RW801", "counted"): "a = x,\na.count(1)",
    ("RW801", "format"): "a = x,\nprint('%s' % a)",
    ("RW801", "line goes on"): "x = f(\n    a,\n)\nx.y",
    ("RW802", "both"): "class T:\n    def __init__(self): pass\n    def init(self): super().__init__()",
    (
        "RW802",
        "called",
    ): "class T:\n    def init(self, a): self.a = a\n    def g(self): return self.a\nt = T()\nt.init(1)",
    ("RW802", "a base with init"): "class T(Base):\n    def init(self, a):\n        super().init()",
    ("RW802", "real int"): "class T:\n    def __int__(self): return 1",
    ("RW802", "interface"): "class T(Protocol):\n    def init(self, a): ...",
    (
        "RW802",
        "private, called",
    ): "class T(B):\n    def __init(self, a): self.a = a\n    def g(self): self.__init(1)",
    ("RW804", "agreed"): "def f(*a, **kw):\n    return dict(*a, **kw)",
    ("RW804", "a global of that name"): "kwargs = {}\ndef f(**kwrgs):\n    return kwargs",
    ("RW804", "star import"): "from x import *\ndef f(): return train_set",
    ("RW804", "globals"): "globals().update(a=1)\ndef f(): return a",
    ("RW804", "caught"): "try:\n    profile\nexcept NameError:\n    profile = None\ndef g(): return profile",
    ("RW804", "tested"): "import sys\nif sys.version_info < (3,):\n    foo()",
    ("RW804", "marked by the author"): "def f(): return injected  # noqa: F821",
    ("RW804", "set by another function"): "def f():\n    global a\n    a = 1\ndef g(): return a",
    ("RW805", "outside loops"): _LOADER + "print(len(next(iter(some))[0]))",
    ("RW805", "used"): _LOADER + "for e in range(3):\n    x, y = next(iter(some))\n    print(x.shape)\n    model(x)",
    ("RW805", "a dict"): "for loader in ds:\n    n = len(next(iter(loader.values())))",
    ("RW805", "a list"): "loader = [[1], [2]]\nfor e in range(3):\n    n = len(next(iter(loader)))",
    ("RW805", "the first batch of a pass"): _LOADER
    + "for e in range(3):\n    it = iter(some)\n    n = next(it)[0].shape[0]\n    for b in it: print(n, b)",
    ("RW805", "iterators of what is not known"): "for e in range(3):\n    it = iter(*rest)\n    n = len(next(it)[0])",
    ("RW805", "the next batch of one pass"): _LOADER + "it = iter(some)\nfor e in range(3):\n    n = len(next(it)[0])",
    ("RW806", "two outputs"): "import torch.nn as nn\nm = nn.Linear(2, 2)\nnn.CrossEntropyLoss()(m(x), y)",
    (
        "RW806",
        "reshaped",
    ): "import torch.nn as nn\nm = nn.Linear(2, 1)\np = m(x).view(2, -1)\nnn.CrossEntropyLoss()(p, y)",
    (
        "RW806",
        "joined",
    ): "import torch, torch.nn as nn\nm = nn.Linear(2, 1)\nnn.CrossEntropyLoss()(torch.cat([m(x), z], 1), y)",
    ("RW806", "another loss"): "import torch.nn as nn\nm = nn.Linear(2, 1)\nnn.MSELoss()(m(x), y)",
    ("RW806", "one of two models"): """
        import torch.nn as nn
        def f(big, x, y):
            m = nn.Linear(2, 1) if big else nn.Linear(2, 3)
            return nn.CrossEntropyLoss()(m(x), y)
    """,
    ("RW808", "with"): "import torch\nwith torch.no_grad():\n    pass",
    ("RW808", "kept"): "import torch\nctx = torch.no_grad()\nctx.__enter__()",
    ("RW808", "stack"): "import torch\nstack.enter_context(torch.no_grad())",
    ("RW808", "decorator"): "import torch\n@torch.no_grad()\ndef f(): pass",
    (
        "RW808",
        "acts at once",
    ): "import torch\ntorch.set_grad_enabled(False)\ntorch.autograd.set_detect_anomaly(True)",
    ("RW808", "process"): "for p in processes:\n    p.join()",
    ("RW808", "raises"): "import torch, pytest\nwith pytest.raises(RuntimeError):\n    torch.cuda.device(99)",
    ("RW809", "called at once"): "import torch.distributed as dist\ndist.barrier()",
    (
        "RW809",
        "asked for",
    ): "import torch.distributed as dist\ntry:\n    dist.barrier\nexcept AttributeError:\n    pass",
    ("RW809", "another attribute"): "import torch.distributed as dist\ndist.is_nccl_available\nx.shape",
}


@pytest.mark.parametrize(("key", "code"), BAD.items(), ids=[" ".join(k) for k in BAD])
def test_a_slip_is_found(key: tuple[str, str], code: str) -> None:
    """Each spelling of the mistake gives at least one finding of its rule, none of them a hint."""
    findings = found(key[0], code)
    assert findings
    assert {f.severity for f in findings} <= {"error", "warning"}


@pytest.mark.parametrize(("key", "code"), LEGAL.items(), ids=[" ".join(k) for k in LEGAL])
def test_what_looks_alike_is_left_alone(key: tuple[str, str], code: str) -> None:
    """Legal code gives nothing."""
    assert found(key[0], code) == []


MENDED = [
    ("RW801", "a = T(m),\na.b()", "a = T(m)\na.b()"),
    ("RW801", "a = T(m) ,  # why\na.b()", "a = T(m)   # why\na.b()"),
    (
        "RW802",
        "class T:\n    def _init_(self, a): self.a = a",
        "class T:\n    def __init__(self, a): self.a = a",
    ),
    ("RW809", "import torch.distributed as d\nd.barrier", "import torch.distributed as d\nd.barrier()"),
    ("RW809", "loader.sampler.set_epoch", "loader.sampler.set_epoch"),
]


@pytest.mark.parametrize(("rule_id", "code", "wanted"), MENDED)
def test_a_fix_changes_only_the_slip(rule_id: str, code: str, wanted: str) -> None:
    """What --fix would write; comments and the rest of the line stay, and nothing is guessed."""
    assert mended(rule_id, code) == wanted


WORDS = [
    (
        "RW804",
        "def load():\n    train_set = 1\ndef prepare():\n    return train_set",
        "local variable of load, line 2",
    ),
    ("RW804", "import torch\noptimizer = 1\nprint(optimzer)", "`optimizer` exists"),
    ("RW804", "def f(*args, **kwards):\n    return dict(*args, **kwargs)", "`kwards` exists"),
    ("RW802", "class T:\n    def init(self, a): pass\nT(1)", "line 3 passes arguments"),
]


@pytest.mark.parametrize(("rule_id", "code", "words"), WORDS)
def test_the_message_says_where(rule_id: str, code: str, words: str) -> None:
    """A finding names the place that proves it."""
    assert words in found(rule_id, code)[0].message


def test_a_tuple_that_nobody_uses_wrongly_is_no_error() -> None:
    """Without a use that fails, a comma behind a parameter's own name is a warning, and nothing is edited."""
    [finding] = found("RW801", "class T:\n    def __init__(self, rank):\n        self.rank = rank,")
    assert (finding.severity, finding.edits) == ("warning", ())


def test_parts_of_a_text_may_miss_names() -> None:
    """A fence of a page continues others."""
    assert found("RW804", "def f(): return train_set", is_fragment=True) == []


def test_a_notebook_may_show_and_load_names() -> None:
    """Magics make names, and a cell's last line shows what it names; a local of another function stays a mistake."""
    cells = ((1, 1), (1, 2), (1, 3), (1, 4))
    assert found("RW804", "print(loaded_by_magic)", cells=cells) == []
    assert found("RW809", "def main(): pass\nmain", cells=cells) == []
    assert found("RW804", "def a():\n    x = 1\ndef b(): return x", cells=cells) != []


def test_set_device_is_named_for_cuda_device() -> None:
    """`torch.cuda.device(rank)` as a statement leaves all ranks on GPU 0: class R13, and the call that was meant."""
    [finding] = found("RW808", "import torch\ntorch.cuda.device(1)")
    assert finding.failure_class == "R13"
    assert "torch.cuda.set_device" in finding.fix
