"""The check knows rankwise's own calls: what their docstrings call collective is one for it, and their contexts tell ranks apart."""

from __future__ import annotations

import inspect

import pytest

import rankwise
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.registry import all_rules
from rankwise.lint.running.check import check_unit

HEAD = """\
import torch
import rankwise
from rankwise import checkpoint

ctx = rankwise.init()
model = rankwise.apply_ddp(torch.nn.Linear(2, 2))
x = torch.ones(2)
"""
TF = """\
from rankwise import tf

strategy = tf.distribute.MirroredStrategy()
"""
COLLECTIVES = [
    name
    for name in rankwise.__all__
    if inspect.isfunction(one := getattr(rankwise, name))
    and "Collective: every rank of the group must call this" in (one.__doc__ or "")
]


def rules_of(code: str) -> list[str]:
    unit = CodeUnit(path="train.py", language="python", code=code)
    return [found.rule for found in check_unit(unit, Project(), all_rules()) if found.severity == "error"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_ours_on_some_ranks_is_found(name: str) -> None:
    """What all ranks of a group must call is missed where one rank alone calls it, and not where all do."""
    assert set(rules_of(f"{HEAD}if ctx.is_main:\n    rankwise.{name}(x)\n")) & {"RW101", "RW102"}
    assert rules_of(f"{HEAD}rankwise.{name}(x)\n") == []


def test_checkpoints_on_some_ranks_are_found_but_those_of_one_alone() -> None:
    """`checkpoint.save` writes with all ranks; `alone=True` is for one."""
    save = "if ctx.rank == 0:\n    checkpoint.save('run', {'model': model}, step=1"
    assert rules_of(f"{HEAD}{save})\n") == ["RW105"]
    assert rules_of(f"{HEAD}{save}, alone=True)\n") == []


@pytest.mark.parametrize("path", ["tf.distribute", "tf", "tf.distribute.experimental"])
def test_a_reduction_of_one_replica_is_found(path: str) -> None:
    """In tf's words, too: by whichever of its names the strategy is made."""
    head = TF.replace("tf.distribute", path)
    loop = "for epoch in range(3):\n    if strategy.replica_id == 0:\n        print(strategy.reduce('SUM', 1.0, axis=None))\n"
    assert rules_of(head + loop) == ["RW101"]
    assert rules_of(f"{head}print(strategy.reduce('SUM', 1.0, axis=None))\n") == []


def test_a_loop_of_equally_many_turns_is_not_said_to_differ() -> None:
    """Where a collective within a loop is under a test of the rank, that is the mistake, and not the loop's number of turns."""
    loop = "for epoch in range(3):\n    if ctx.rank == 0:\n        rankwise.all_reduce(x)\n"
    assert rules_of(HEAD + loop) == ["RW101"]
    assert rules_of(f"{HEAD}for turn in range(ctx.rank):\n    rankwise.all_reduce(x)\n") == ["RW109"]


def test_a_rank_that_raises_in_a_function_is_missed_by_none() -> None:
    """The launcher stops the others with it, as where the same stands at the top of a script."""
    train = "def train():\n    if ctx.rank == 1:\n        raise ValueError('12')\n    rankwise.barrier()\n"
    assert rules_of(f"{HEAD}{train}train()\n") == []
    assert rules_of(f"{HEAD}{train.replace('raise ValueError', 'return int')}train()\n") == ["RW102"]


@pytest.mark.parametrize(
    "asked",
    [
        "strategy.cluster_resolver.task_id == 0",
        "strategy.cluster_resolver.task_type == 'worker' and strategy.cluster_resolver.task_id == 0",
        "tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id == 0",
        "is_chief(strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)",
    ],
)
def test_tasks_of_a_cluster_are_ranks(asked: str) -> None:
    """A reduction under a test of tf's task is one of some ranks; its result may be used under such a test."""
    head = TF.replace("Mirrored", "MultiWorkerMirrored") + (
        "def is_chief(task_type, task_id):\n"
        "    return task_type is None or task_type == 'chief' or (task_type == 'worker' and task_id == 0)\n"
    )
    reduced = "strategy.reduce('SUM', 1.0, axis=None)"
    assert rules_of(f"{head}if {asked}:\n    print({reduced})\n") == ["RW101"]
    assert rules_of(f"{head}total = {reduced}\nif {asked}:\n    print(total)\n") == []
