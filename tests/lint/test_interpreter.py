"""The simulated run: what the virtual ranks do, as far as the text tells."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.interpreter.history import Fork, Inline, Loop, Op
from rankwise.lint.interpreter.values import Spread
from rankwise.lint.paths.divergences import divergences
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.lint.interpreter.history import Item
    from rankwise.lint.script import Script

HEAD = "import os, time\nimport torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"


def studied(code: str, path: str = "train.py") -> Script:
    return study(CodeUnit(path=path, language="python", code=HEAD + textwrap.dedent(code)), Project())


def ops(items: Sequence[Item]) -> list[str]:
    names: list[str] = []
    for item in items:
        if isinstance(item, Op):
            names.append(item.name)
        elif isinstance(item, (Loop, Inline)):
            names += ops(item.items)
        elif isinstance(item, Fork):
            for arm in item.arms:
                names += ops(arm.items)
    return names


def by_rank(script: Script) -> dict[int, list[str]]:
    return {history.rank: ops(history.items) for history in script.entries[0].histories}


@pytest.mark.parametrize(
    "rank",
    [
        "dist.get_rank()",
        "int(os.environ['RANK'])",
        "int(os.getenv('RANK', '0'))",
        "int(os.environ.get('RANK', 0))",
        "{'r': dist.get_rank()}['r']",
        "(lambda: dist.get_rank())()",
        "min(dist.get_rank(), 100)",
    ],
)
def test_a_rank_is_known_however_it_was_asked_for(rank: str) -> None:
    """Each way to ask for the rank gives each imagined rank its own number."""
    found = by_rank(studied(f"rank = {rank}\nif rank == 0:\n    dist.barrier()\n"))
    assert found[0] == ["barrier"]
    assert all(not names for number, names in found.items() if number)


@pytest.mark.parametrize(
    "code",
    [
        "if rank == 0 and flag():\n    dist.barrier()",
        "[dist.barrier() for _ in range(3) if rank == 0] if rank == 0 else None",
        "match rank:\n    case 0:\n        dist.barrier()\n    case _:\n        pass",
        "while rank == 0 and flag():\n    dist.barrier()",
        "rank or dist.barrier()",
        "def work():\n    if rank:\n        return\n    dist.barrier()\nwork()",
        "def only(f):\n    def inner():\n        if rank == 0:\n            f()\n    return inner\n@only\ndef work():\n    dist.barrier()\nwork()",
        "class T:\n    def __init__(self):\n        self.main = rank == 0\n    @property\n    def last(self):\n        dist.barrier()\nt = T()\nif t.main:\n    t.last",
        "from functools import partial\nf = partial(dist.barrier)\nif not rank:\n    f()",
    ],
)
def test_what_only_rank_0_does_is_seen_in_any_form(code: str) -> None:
    """Rank 0 reaches the barrier, rank 1 does not, and the comparison says so."""
    script = studied("rank = dist.get_rank()\n" + code)
    found = by_rank(script)
    assert "barrier" in found[0]
    assert "barrier" not in found[1]
    assert list(divergences(script.entries[0].histories))


@pytest.mark.parametrize(
    "code",
    [
        "if rank != 0:\n    dist.barrier()\nwork()\nif rank == 0:\n    dist.barrier()",
        "if rank == 0:\n    work()\n    dist.barrier()\nelse:\n    dist.barrier()",
        "from contextlib import contextmanager\n@contextmanager\ndef first():\n    if rank:\n        dist.barrier()\n    yield\n"
        "    if not rank:\n        dist.barrier()\nwith first():\n    work()",
        "if args.distributed and rank != 0:\n    dist.barrier()\nwork()\nif args.distributed and rank == 0:\n    dist.barrier()",
        "g = dist.new_group([0, 1])\nif rank in (0, 1):\n    dist.barrier(group=g)",
        "if rank % 2:\n    dist.send(x, rank - 1)\nelse:\n    dist.recv(x, rank + 1)",
    ],
)
def test_balanced_forms_do_not_part_the_ranks(code: str) -> None:
    """What all ranks do in other words is the same."""
    script = studied("rank = dist.get_rank()\n" + code)
    assert not list(divergences(script.entries[0].histories))


def test_a_generator_runs_where_it_is_consumed() -> None:
    """Its collectives belong to the loop that asks for its values, not to its call."""
    code = """
    def averaged():
        for _ in range(3):
            dist.all_reduce(x)
            yield x
    values = averaged()
    dist.barrier()
    for v in values:
        pass
    """
    assert by_rank(studied(code))[0] == ["barrier", "all_reduce"]


def test_a_reduced_value_is_the_same_on_all_ranks() -> None:
    """After all_reduce in place a branch on the value is no branch on rank-local data."""
    code = """
    t = torch.tensor(time.time())
    if t.item() > 5:
        dist.barrier()
    dist.all_reduce(t)
    if t.item() > 5:
        dist.barrier()
    """
    forks = [item for item in studied(code).entries[0].histories[0].items if isinstance(item, Fork)]
    assert [fork.value.spread for fork in forks] == [Spread.LOCAL, Spread.EQUAL]


def test_only_names_that_are_used_are_looked_up_in_imported_modules(tmp_path: Path) -> None:
    """A project module's helper is run in place; the module's other statements are not."""
    (tmp_path / "helper.py").write_text(
        "import torch.distributed as dist\nX = dist.all_reduce(1)\ndef sync():\n    dist.barrier()\n"
    )
    script = studied("from helper import sync\nsync()\n", str(tmp_path / "train.py"))
    assert by_rank(script)[0] == ["barrier"]
    assert tmp_path / "helper.py" in {module.path for module in [script.entries[0].histories[0].calls[-1].module]}


def test_endless_recursion_and_size_are_bounded() -> None:
    """A program that calls itself, or calls much, is seen in part and not compared."""
    code = "def f(n):\n    dist.barrier()\n    return f(n - 1) + f(n - 2)\nf(5)\n"
    assert by_rank(studied(code))[0]
    doubling = "".join(f"def f{n + 1}():\n    f{n}()\n    f{n}()\n" for n in range(20))
    script = studied(
        "def f0():\n    dist.barrier()\n" + doubling + "if dist.get_rank() == 0:\n    f14()\n    dist.barrier()\n"
    )
    assert script.entries[0].histories[0].is_cut
    assert not list(divergences(script.entries[0].histories))


def test_a_function_nobody_calls_is_an_entry_of_its_own() -> None:
    """Library code is looked at with what the names of its parameters tell."""
    script = studied("def save(model, rank):\n    if rank == 0:\n        dist.barrier()\n")
    entry = next(one for one in script.entries if one.name == "save")
    assert [ops(history.items) for history in entry.histories][:2] == [["barrier"], []]


def test_spawned_ranks_are_the_ranks() -> None:
    """mp.spawn's function runs with each rank's number, and the launching process is none of them."""
    code = """
    import torch.multiprocessing as mp
    def main(rank, size):
        if rank == 0:
            dist.barrier()
    if __name__ == "__main__":
        mp.spawn(main, args=(2,), nprocs=2)
    """
    found = by_rank(studied(code))
    assert found[0] == ["barrier"]
    assert found[1] == []
