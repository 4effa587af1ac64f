"""Starting processes with a function of the text (RW812 to RW814)."""

from __future__ import annotations

import pytest

from lint.plain_check import found

MP = "import torch.multiprocessing as mp\n"
GUARD = "if __name__ == '__main__':\n    "
BAD = {
    ("RW812", "plain"): MP + "def f(i): pass\nmp.spawn(f, nprocs=2)",
    ("RW812", "through a function"): MP + "def f(i): pass\ndef main():\n    mp.spawn(f, nprocs=2)\nmain()",
    ("RW812", "in a loop"): MP + "def f(i): pass\nfor n in (1, 2):\n    mp.spawn(f, nprocs=n)",
    ("RW812", "imported"): "from torch.multiprocessing import spawn\ndef f(i): pass\nspawn(f)",
    (
        "RW812",
        "in try",
    ): "import torch\ndef f(i): pass\ntry:\n    torch.multiprocessing.spawn(f)\nfinally:\n    pass",
    ("RW812", "Process with spawn"): MP + "mp.set_start_method('spawn')\ndef f(): pass\nmp.Process(target=f).start()",
    ("RW812", "Process by default"): MP + "def f(): pass\np = mp.Process(target=f)\np.start()",
    ("RW220", "reads its local rank"): MP
    + "import os, torch.distributed as dist\ndef f(i): dist.init_process_group('gloo')\n"
    + GUARD
    + "print(os.environ['LOCAL_RANK'])\n    mp.spawn(f, nprocs=2)",
    ("RW813", "lambda"): MP + GUARD + "mp.spawn(lambda i: None, nprocs=2)",
    ("RW813", "named lambda"): MP + "f = lambda i: None\n" + GUARD + "mp.spawn(f, nprocs=2)",
    ("RW813", "local"): MP + "def main():\n    def f(i): pass\n    mp.spawn(f, nprocs=2)",
    ("RW813", "local to a method"): MP + "class A:\n    def go(self):\n        def f(i): pass\n        mp.spawn(fn=f)",
    (
        "RW813",
        "of a context",
    ): MP + "def go():\n    ctx = mp.get_context('spawn')\n    ctx.Process(target=lambda: None).start()",
    ("RW813", "under the guard"): MP + GUARD + "def f(i): pass\n    mp.spawn(f)",
    ("RW813", "called"): MP + "def f(i): print(i)\n" + GUARD + "mp.spawn(f(0), nprocs=2)",
    ("RW813", "Process, called"): MP + "def f(i): print(i)\n" + GUARD + "mp.Process(target=f(0)).start()",
    ("RW814", "rank missing"): MP + "def f(world): pass\n" + GUARD + "mp.spawn(f, args=(2,), nprocs=2)",
    ("RW814", "rank twice"): MP + "def f(rank, world): pass\n" + GUARD + "mp.spawn(f, args=(0, 2), nprocs=2)",
    ("RW814", "too few"): MP + "def f(rank, world, n): pass\n" + GUARD + "mp.spawn(f, (2,), 2)",
    ("RW814", "nothing taken"): MP + "def f(): pass\n" + GUARD + "mp.spawn(f, nprocs=2)",
    ("RW814", "no tuple"): MP + "def f(r, n): pass\n" + GUARD + "n = 2\n    mp.spawn(f, args=(n), nprocs=2)",
    ("RW814", "Process"): MP + "def f(r, n): pass\n" + GUARD + "mp.Process(target=f, args=(1,)).start()",
}
LEGAL = {
    ("RW220", "one process"): MP + "import os\ndef f(i): pass\nr = os.environ['LOCAL_RANK']\nmp.spawn(f, nprocs=1)",
    ("RW220", "under a test"): MP
    + "import os\ndef f(i): pass\nr = os.environ['LOCAL_RANK']\nif args.spawn:\n    mp.spawn(f, nprocs=4)",
    ("RW220", "the ranks read it"): MP + "import os\ndef f(i): return os.environ['LOCAL_RANK']\nmp.spawn(f, nprocs=4)",
    ("RW812", "guarded"): MP + "def f(i): pass\n" + GUARD + "mp.spawn(f, nprocs=2)",
    ("RW812", "guarded main"): MP + "def f(i): pass\ndef main():\n    mp.spawn(f)\n" + GUARD + "main()",
    ("RW812", "nobody calls it"): MP + "def launch(f):\n    mp.spawn(f)",
    ("RW812", "early return"): MP + "def f(i): pass\nif __name__ != '__main__':\n    pass\nelse:\n    mp.spawn(f)",
    ("RW812", "fork"): MP + "def f(i): pass\nmp.start_processes(f, start_method='fork')",
    ("RW813", "function"): MP + "def f(i): pass\n" + GUARD + "mp.spawn(f)",
    ("RW813", "fork"): MP + "mp.start_processes(lambda i: None, start_method='fork')",
    ("RW813", "Process forks"): MP + "def main():\n    def f(): pass\n    mp.Process(target=f).start()",
    ("RW813", "made by a call"): MP + "def make(n): return n\n" + GUARD + "mp.spawn(make(1))",
    ("RW813", "partial"): MP + "from functools import partial\ndef f(i): pass\n" + GUARD + "mp.spawn(partial(f))",
    ("RW814", "right"): MP + "def f(rank, world, n=3): pass\n" + GUARD + "mp.spawn(f, args=(2,), nprocs=2)",
    ("RW814", "star"): MP + "def f(rank, *rest): pass\n" + GUARD + "mp.spawn(f, args=(2, 3, 4))",
    ("RW814", "args from a name"): MP + "def f(rank, a, b): pass\ndef go(args):\n    mp.spawn(f, args=args)",
    ("RW814", "starred args"): MP + "def f(rank, a, b): pass\ndef go(args):\n    mp.spawn(f, args=(*args,))",
    ("RW814", "a tuple in a name"): MP + "def f(rank, a): pass\na = (1,)\ndef go():\n    mp.spawn(f, args=a)",
    ("RW814", "kwargs"): MP
    + "def f(a, b): pass\ndef go():\n    mp.Process(target=f, args=(1,), kwargs={'b': 2}).start()",
    ("RW814", "decorated"): MP + "@record\ndef f(): pass\n" + GUARD + "mp.spawn(f)",
}


@pytest.mark.parametrize(("key", "code"), BAD.items(), ids=[" ".join(k) for k in BAD])
def test_a_start_that_fails_is_found(key: tuple[str, str], code: str) -> None:
    """Each way to start processes wrongly gives a finding of its rule: of class L13, or I24 where a launcher has started them already."""
    assert [f.failure_class for f in found(key[0], code)] == ["I24" if key[0] == "RW220" else "L13"]


@pytest.mark.parametrize(("key", "code"), LEGAL.items(), ids=[" ".join(k) for k in LEGAL])
def test_a_start_that_works_is_left_alone(key: tuple[str, str], code: str) -> None:
    """Legal ways give nothing."""
    assert found(key[0], code) == []


def test_both_numbers_are_told() -> None:
    """The message says what the function takes and what it gets."""
    [finding] = found("RW814", MP + "def f(world): pass\n" + GUARD + "mp.spawn(f, args=(2, 3))")
    assert "takes 1 argument (world)" in finding.message
    assert "passes 3: the process index and 2 from args" in finding.message


def test_a_process_is_an_error_only_where_spawn_is_chosen() -> None:
    """Linux forks by default, so a Process at the file's own level is a warning."""
    assert [f.severity for f in found("RW812", BAD["RW812", "Process by default"])] == ["warning"]
    assert [f.severity for f in found("RW812", BAD["RW812", "Process with spawn"])] == ["error"]


def test_a_notebooks_function_cannot_be_spawned() -> None:
    """Children of a notebook find no file to import the function from."""
    code = MP + "def f(i): pass\nmp.spawn(f)"
    assert [f.rule for f in found("RW813", code, cells=((1, 1), (1, 2), (1, 3)))] == ["RW813"]
