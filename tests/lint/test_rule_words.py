"""What findings say: in the user's own names, in right grammar, and with a fix that fits the place."""

from __future__ import annotations

import textwrap

import pytest

from lint.plain_check import rule_of
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project, parse
from rankwise.lint.running.check import check_unit

HEAD = """\
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
me = dist.get_rank()
x = torch.ones(1)
"""
NCCL = HEAD.replace("gloo", "nccl")
SAID = {
    ("RW101", "behind an early exit"): (HEAD + "if me > 0:\n    sys.exit(0)\ndist.all_reduce(x)", "before line 8, or let every rank reach it"),
    ("RW101", "nothing to use"): (HEAD + "if me == 0:\n    dist.broadcast(x, 0)", "on every rank, outside the test"),
    ("RW101", "a result to use"): (HEAD + "if me == 0:\n    dist.all_reduce(x)", "keep only the use of its result"),
    ("RW101", "case of a match"): (HEAD + "match me:\n    case 0:\n        dist.all_reduce(x)", "(`match me: case 0`)"),
    ("RW101", "comprehension"): (HEAD + "[dist.all_reduce(x) for _ in range(3) if me == 0]", "only rank 0 reaches dist.all_reduce() (`me == 0`)"),
    ("RW101", "several ranks"): (HEAD + "if me in (1, 2):\n    dist.all_reduce(x)", "only some ranks reach"),
    ("RW102", "behind an early return"): (HEAD + "def f():\n    if me > 0:\n        return\n    dist.barrier()\nf()", "before line 9, or let"),
    ("RW102", "other half"): (HEAD + "if me != 0:\n    dist.barrier()\nprint(1)\ndist.barrier()", "`if rank == 0: dist.barrier()`"),
    ("RW105", "writes by itself"): (
        "import torch.distributed.checkpoint as dcp\n" + HEAD + "if me == 0:\n    dcp.save({'x': x}, 'a')", "it writes with all of them",
    ),
    ("RW109", "comprehension over a share"): (HEAD + "[dist.all_reduce(x) for _ in range(me)]", "`range(me)`"),
    ("RW112", "the test"): (
        HEAD + textwrap.dedent("""
        net = DDP(torch.nn.Linear(1, 1))
        for batch in DataLoader(list(torch.rand(64, 1)), batch_size=4):
            loss = net(batch).mean()
            if torch.isnan(loss):
                continue
            loss.backward()
        """), "`float(torch.isnan(loss))`",
    ),
    ("RW306", "kept"): (HEAD + "w = dist.all_reduce(x, async_op=True)", "call `w.wait()` before `x` is read"),
    ("RW306", "no name"): (HEAD + "dist.isend(x + 1, 1)", "; its tensor may hold"),
    ("RW407", "own names"): (
        NCCL + "net = torch.nn.BatchNorm1d(4).cuda()\nddp = DDP(net)\nddp = torch.nn.SyncBatchNorm.convert_sync_batchnorm(ddp)",
        "`DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net))`",
    ),
    ("RW501", "own names"): (
        HEAD + textwrap.dedent("""
        data = list(torch.rand(64, 1))
        sp = DistributedSampler(data)
        net, loader = DDP(torch.nn.Linear(1, 1)), DataLoader(data, sampler=sp)
        for ep in range(3):
            for batch in loader:
                net(batch).mean().backward()
        """), "`sp.set_epoch(ep)`",
    ),
    ("RW802", "said once"): (
        "import torch\nclass Data(torch.utils.data.Dataset):\n    def init(self):\n        self.rows = []\n"
        "    def __len__(self):\n        return len(self.rows)\n", "is meant: nothing here calls it",
    ),
}  # fmt: skip


def findings(rule: str, code: str) -> list[str]:
    unit = CodeUnit(path="train.py", language="python", code=code)
    return [f"{one.message} -> {one.fix}" for one in check_unit(unit, Project(), [rule_of(rule)])]


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [(case, *said) for case, said in SAID.items()],
    ids=[" ".join(case) for case in SAID],
)
def test_finding_says_it_in_fitting_words(case: tuple[str, str], code: str, words: str) -> None:
    """The rule has one finding here, and its message or fix has these words."""
    said = findings(case[0], code)
    assert len(said) == 1
    assert words in said[0]


def test_test_on_the_rank_in_a_comprehension_is_told_once() -> None:
    """A comprehension that only rank 0 fills is a collective under a test, not a loop of uneven turns."""
    assert not findings("RW109", HEAD + "[dist.all_reduce(x) for _ in range(3) if me == 0]")


def test_one_tensor_on_the_cpu_is_told_once() -> None:
    """However often a CPU tensor is passed to NCCL, one finding names all the places."""
    unit = CodeUnit(path="train.py", language="python", code=NCCL + "dist.all_reduce(x)\n" * 3)
    found = check_unit(unit, Project(), [rule_of("RW307")])
    assert [len(one.also) for one in found] == [2]


def test_writers_of_one_line_are_told_once() -> None:
    """Several writers on one line are one mistake."""
    code = HEAD + "from torch.utils.tensorboard import SummaryWriter\na, b = SummaryWriter(), SummaryWriter()"
    assert len(findings("RW614", code)) == 1


def test_too_deep_nesting_is_told_without_names_of_classes() -> None:
    """What the reader sees is what is wrong with the text, not how Python calls it."""
    with pytest.raises(SyntaxError) as caught:
        parse("(" * 100_000 + ")" * 100_000)
    assert "Error" not in str(caught.value)


@pytest.mark.parametrize("rule", ["RW101", "RW102"])
@pytest.mark.parametrize(
    ("ending", "is_told"),
    [
        ('sys.exit("no data for this rank")', False),
        ("sys.exit(3)", False),
        ("os.abort()", False),
        ('raise ValueError("no data")', False),
        ("raise SystemExit(1)", False),
        ("stop()", False),
        ("sys.exit()", True),
        ("sys.exit(0)", True),
        ("raise SystemExit", True),
    ],
)
def test_a_rank_that_fails_on_purpose_is_missed_by_none(rule: str, ending: str, *, is_told: bool) -> None:
    """The launcher stops the others with it; who leaves with exit code 0 is waited for."""
    stop = 'def stop():\n    print("no data")\n    sys.exit("no data")\n'
    code = f"{HEAD}{stop}if me == 1:\n    {ending}\n"
    op = {"RW101": "dist.all_reduce(x)", "RW102": "dist.barrier()"}[rule]
    assert bool(findings(rule, code + op)) == is_told


@pytest.mark.parametrize(("plugin", "severity"), [("", "hint"), ("fsdp_plugin=plugin", "warning")])
def test_accelerate_waits_for_the_state_of_all_only_with_shards(plugin: str, severity: str) -> None:
    """Where the text names no way to shard, the command that starts the ranks decides, and most start plain copies."""
    code = f"from accelerate import Accelerator\nacc = Accelerator({plugin})\nif acc.is_main_process:\n    acc.save_state('x')\n"
    [found] = check_unit(CodeUnit(path="train.py", language="python", code=code), Project(), [rule_of("RW105")])
    assert (found.severity, "with FSDP" in found.message) == (severity, severity == "hint")
