"""Why a value may differ between ranks, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.interpreter.values import Spread

if TYPE_CHECKING:
    import ast

    from rankwise.lint.interpreter.values import Value

_WHY = (("exception", "and an exception occurs on one rank"), ("signal", "and signals reach each rank at a different moment"), ("time",
        "and clocks differ"), ("input", "and input differs"), ("queue", "and each process has its own queue"), ("random",
        "and each process draws its own random numbers"), ("memory", "and memory in use differs"), ("own", "which each process creates for itself"),
        ("host", "which differs between hosts"), ("exists", "and a file may exist for one rank and not for another"), ("files",
        "and folders may differ, or be read at different moments"), ("data", "which comes from this rank's own data"), ("item",
        "which comes from this rank's own data"), ("rank", "which differs between ranks"))  # fmt: skip


def why(value: Value) -> str:
    """The strongest reason."""
    return next((words for origin, words in _WHY if origin in value.origin), "which may differ between ranks")


_WHO = frozenset({"rank", "local_rank", "node_rank", "world_size", "share", "agreed"})
_AT_SETUP = _WHO | {"exception", "once"}


def is_perhaps_shared(value: Value) -> bool:
    """Whether the ranks may well see the same.

    So it is with one file system for all, an exception where things are set up, a test on the rank that was not
    decided.
    """
    if value.spread is Spread.RANK and value.origin <= _WHO:
        return True
    if "once" in value.origin and value.origin <= _AT_SETUP:
        return True
    return not value.origin.isdisjoint({"exists", "files"}) and value.origin.isdisjoint({"time", "data", "item"})


def is_resumed(value: Value) -> bool:
    """Whether it asks for a number that has been counted on from what was found on the disk, which is the same for all or wrong already."""
    if value.origin.isdisjoint({"exists", "files"}) or not is_perhaps_shared(value):
        return False
    made = (one.made for one in sources_of(value, cuts=False))
    return "loaded" in value.origin or any(one is not None and one.name == "operator.Add" for one in made)


def test_of(node: ast.AST) -> ast.AST:
    """The test of a branch or loop, which is what a finding marks."""
    node = next(iter(getattr(node, "generators", ())), node)
    for name in ("test", "subject", "iter"):
        test = getattr(node, name, None)
        if test is not None:
            return test  # type: ignore[no-any-return]
    return node
