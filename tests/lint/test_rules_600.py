"""Checkpoints, metrics, logs (RW601 to RW615): each mistake is found in other spellings too, legal code is left alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from lint.plain_check import rule_of
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding

HEAD = """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
ddp = DDP(net)
"""

BAD = {
    ("RW601", "in a method"): """
        class Job:
            def keep(self):
                torch.save({"w": net.state_dict()}, os.path.join("out", "w.pt"))
        Job().keep()
    """,
    ("RW601", "numpy"): 'import numpy as np\nnp.save("x.npy", [1])',
    ("RW601", "weights of transformers"): "def end(model, where):\n    model.save_pretrained(where)\nend(object(), 'out')",
    ("RW602", "environment"): 'if os.environ["LOCAL_RANK"] == "0":\n    torch.save(net.state_dict(), "w.pt")',
    ("RW603", "others read"): """
        if dist.get_rank() == 0:
            torch.save([1], "x.pt")
        if dist.get_rank() != 0:
            x = torch.load("x.pt")
    """,
    ("RW604", "path in a name"): """
        LAST = "last.pt"
        if os.path.isfile(LAST):
            net.load_state_dict(torch.load(LAST, map_location="cpu"))
        for step in range(9):
            if step % 3 == 0 and dist.get_rank() == 0:
                torch.save(net.state_dict(), LAST)
    """,
    ("RW605", "by name"): 'net.cuda()\nstate = torch.load(f="resume.ckpt")\nnet.load_state_dict(state["m"])',
    ("RW606", "table"): 'r = dist.get_rank()\ns = torch.load("a", {"cuda:0": "cuda:%d" % r})',
    ("RW607", "given at once"): "net.load_state_dict(ddp.state_dict())",
    ("RW607", "the other way"): """
        if dist.get_rank() == 0:
            torch.save({"m": net.state_dict()}, "m.pt")
        dist.barrier()
        ddp.load_state_dict(torch.load("m.pt", map_location="cpu")["m"])
    """,
    ("RW608", "optimizer"): """
        adam = torch.optim.Adam(ddp.parameters())
        c = torch.load("c.pt", map_location="cpu")
        net.load_state_dict(c["net"])
        for e in range(c["epoch"] + 1, 9):
            ddp(torch.ones(1, 2)).sum().backward()
            adam.step()
    """,
    ("RW608", "epoch again"): """
        c = torch.load("c.pt", map_location="cpu")
        begin = c["e"]
        for e in range(begin, 9):
            ddp(torch.ones(1, 2)).sum().backward()
            torch.save({"e": e}, "c.pt.tmp")
    """,
    ("RW609", "newest"): """
        import glob
        path = sorted(glob.glob("ckpt/*.pt"))[-1]
        net.load_state_dict(torch.load(path, map_location="cpu"))
    """,
    ("RW610", "helper saves"): """
        import signal
        def keep():
            torch.save(net.state_dict(), "now.pt")
        def stop(number, frame):
            keep()
        signal.signal(signal.SIGUSR1, stop)
    """,
    ("RW610", "ignored"): "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ("RW611", "logger"): """
        import wandb
        loss = ddp(torch.ones(1, 2)).mean()
        if dist.get_rank() == 0:
            wandb.log({"val_loss": loss.item()})
    """,
    ("RW612", "loader's length"): """
        def run(loader):
            total = 0.0
            for x in loader:
                total += ddp(x).mean().item()
            mean = torch.tensor(total / len(loader))
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            return mean
        run([torch.ones(1, 2)])
    """,
    ("RW613", "name says so"): "avg_loss = ddp(torch.ones(1, 2)).mean().detach()\ndist.all_reduce(avg_loss)\nprint(avg_loss)",
    ("RW614", "writer"): 'from torch.utils.tensorboard import SummaryWriter\nw = SummaryWriter("runs")',
    ("RW614", "bar"): "from tqdm import tqdm\nfor x in tqdm(range(3)):\n    pass",
    ("RW615", "one cycle"): """
        from accelerate import Accelerator
        acc = Accelerator()
        data = torch.utils.data.DataLoader([1, 2], shuffle=True)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        opt, data = acc.prepare(opt, data)
        plan = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=3 * len(data))
        plan = acc.prepare(plan)
    """,
    ("RW611", "share over all samples"): """
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        right = 0
        with torch.no_grad():
            for x in loader:
                right += (ddp(x) > 0).sum().item()
        print("accuracy on rank", 100 * right / len(loader.dataset))
    """,
    ("RW611", "share over all samples, by name"): """
        def judge(net, loader, rows):
            right = torch.zeros(1)
            num = len(rows)
            net.eval()
            for x in loader:
                with torch.no_grad():
                    right += (net(x) > 0).sum()
            return right.item() / num
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows))
        judge(ddp, loader, rows)
    """,
}  # fmt: skip

LEGAL = {
    ("RW601", "rank in the path"): 'torch.save(net.state_dict(), f"w_{dist.get_rank()}.pt")',
    ("RW601", "helper leaves early"): """
        def keep(state, path):
            if dist.get_rank() != 0:
                return
            torch.save(state, path)
        keep(net.state_dict(), "w.pt")
    """,
    ("RW601", "buffer"): "import io\nbuffer = io.BytesIO()\ntorch.save(net.state_dict(), buffer)",
    ("RW601", "test of a name"): "if is_writer:\n    torch.save(net.state_dict(), 'w.pt')",
    ("RW602", "each node's own disk"): 'if os.environ["LOCAL_RANK"] == "0":\n    torch.save(net.state_dict(), "/tmp/w.pt")',
    ("RW603", "any collective between"): """
        if dist.get_rank() == 0:
            torch.save([1], "x.pt")
        dist.all_reduce(torch.ones(1))
        x = torch.load("x.pt")
    """,
    ("RW603", "read by the writer"): 'if dist.get_rank() == 0:\n    torch.save([1], "x.pt")\n    x = torch.load("x.pt")',
    ("RW604", "name with the step"): """
        net.load_state_dict(torch.load("start.pt", map_location="cpu"))
        for step in range(9):
            torch.save(net.state_dict(), f"s{step}.pt")
    """,
    ("RW605", "data"): 'net.cuda()\ntokens = torch.load("tokens.pt")',
    ("RW606", "local rank"): 's = torch.load("a", map_location="cuda:" + os.environ["LOCAL_RANK"])',
    ("RW607", "prefix taken off"): """
        if dist.get_rank() == 0:
            torch.save(ddp.state_dict(), "m.pt")
        dist.barrier()
        net.load_state_dict({k[7:]: v for k, v in torch.load("m.pt").items() if k.startswith("module.")})
    """,
    ("RW607", "same form"): "ddp.load_state_dict(ddp.state_dict())\nnet.load_state_dict(ddp.module.state_dict())",
    ("RW608", "weights to start from"): """
        adam = torch.optim.Adam(ddp.parameters())
        net.load_state_dict(torch.load("pretrained.pt", map_location="cpu"))
        for e in range(9):
            ddp(torch.ones(1, 2)).sum().backward()
            adam.step()
    """,
    ("RW609", "rank 0 decides"): """
        box = [os.path.exists("last.pt")]
        dist.broadcast_object_list(box, src=0)
        if box[0]:
            net.load_state_dict(torch.load("last.pt", map_location="cpu"))
    """,
    ("RW610", "flag"): "import signal\nseen = []\nsignal.signal(signal.SIGTERM, lambda *a: seen.append(1))",
    ("RW611", "told as local"): 'loss = ddp(torch.ones(1, 2)).mean()\nif dist.get_rank() == 0:\n    print("local loss", loss.item())',
    ("RW612", "sum and count"): """
        both = torch.tensor([3.0, 4.0])
        dist.all_reduce(both)
        print(both[0] / both[1])
    """,
    ("RW613", "divided in place"): "loss = ddp(torch.ones(1, 2)).mean().detach()\ndist.all_reduce(loss)\nloss.div_(dist.get_world_size())",
    ("RW613", "average asked for"): "loss = ddp(torch.ones(1, 2)).mean().detach()\ndist.all_reduce(loss, op=dist.ReduceOp.AVG)",
    ("RW613", "count"): "tokens = torch.ones(1)\ndist.all_reduce(tokens)\nprint(tokens)",
    ("RW614", "disabled elsewhere"): 'import wandb\nwandb.init(mode="online" if dist.get_rank() == 0 else "disabled")',
    ("RW614", "a run for each, on purpose"): 'import wandb\nwandb.init(group="job")',
    ("RW615", "not prepared"): """
        from accelerate import Accelerator
        acc = Accelerator()
        data = torch.utils.data.DataLoader([1, 2], shuffle=True)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        opt, data = acc.prepare(opt, data)
        plan = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=3 * len(data))
    """,
    ("RW611", "reduced before it is divided"): """
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        right = 0
        with torch.no_grad():
            for x in loader:
                right += (ddp(x) > 0).sum().item()
        total = torch.tensor(right)
        dist.all_reduce(total)
        print("accuracy", total.item() / len(rows))
    """,
    ("RW611", "parts of the whole, added up"): """
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        right = 0
        with torch.no_grad():
            for x in loader:
                right += (ddp(x) > 0).sum().item()
        part = torch.tensor(right / len(rows))
        dist.all_reduce(part)
    """,
    ("RW611", "over its own samples"): """
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        right = 0
        with torch.no_grad():
            for x in loader:
                right += (ddp(x) > 0).sum().item()
        print("accuracy on rank", right / len(loader.sampler))
    """,
    ("RW611", "no sampler"): """
        from torch.utils.data import DataLoader
        rows, right = list(torch.rand(64, 2)), 0
        loader = DataLoader(rows)
        with torch.no_grad():
            for x in loader:
                right += (ddp.module(x) > 0).sum().item()
        if dist.get_rank() == 1:
            print("accuracy", right / len(rows))
    """,
    ("RW611", "sent through a helper"): """
        from metrics import reduce_sum
        from torch.utils.data import DataLoader, DistributedSampler
        rows = list(torch.rand(64, 2))
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        right = 0
        with torch.no_grad():
            for x in loader:
                right += (ddp(x) > 0).sum().item()
        right = reduce_sum(right)
        print("accuracy on rank", right / len(rows))
    """,
}  # fmt: skip


def found(rule_id: str, code: str) -> list[Finding]:
    """What a rule finds in a program."""
    text = HEAD + textwrap.dedent(code)
    script = study(CodeUnit(path="train.py", language="python", code=text), Project())
    return list(rule_of(rule_id).check(script))


def by_key(key: tuple[str, str]) -> str:
    return ": ".join(key)


@pytest.mark.parametrize("key", BAD, ids=by_key)
def test_mistake_is_found(key: tuple[str, str]) -> None:
    """Each mistake is found, in one line of words, at a place of the text."""
    findings = found(key[0], BAD[key])
    assert findings
    for one in findings:
        assert "\n" not in one.message + one.fix
        assert one.span.line > HEAD.count("\n")
        assert one.failure_class in rule_of(key[0]).classes


@pytest.mark.parametrize("key", LEGAL, ids=by_key)
def test_legal_code_is_left_alone(key: tuple[str, str]) -> None:
    """What looks like the mistake and is none gives no finding."""
    assert found(key[0], LEGAL[key]) == []


def test_once_a_node_is_no_error() -> None:
    """A save by the first rank of each node may be right: it is a warning, and not also told as one of all ranks."""
    code = 'if int(os.environ["LOCAL_RANK"]) == 0:\n    torch.save([1], "w.pt")'
    assert [one.severity for one in found("RW602", code)] == ["warning"]
    assert found("RW601", code) == []
