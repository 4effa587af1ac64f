"""Which rank a device index was made of: the global one, the local one, or the global one folded onto a node."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal

from rankwise.lint.library.hints import ENVIRON, role_of
from rankwise.lint.topics.job_view import INIT
from rankwise.lint.topics.option_text import parts_of_sources

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

Fault = Literal["bare", "modulo"]
_LOCAL = frozenset({"local_rank", "spawned", "node_rank", "host", "env", "local_world_size"})
_KNOWN_SOURCES = frozenset({"torch.distributed.get_rank", "torch.distributed.get_node_rank"})


def fault_of(script: Script, place: Place, value: Value | None, node: ast.AST | None) -> Fault | None:
    """What is wrong with a device that is chosen by the rank; None if nothing is, or it is not certain."""
    if value is None or "rank" not in value.origin or value.origin & _LOCAL:
        return None
    if not _is_certain(script, place, node):
        return None
    if _has_modulo(script, node):
        return None if _by_local_world(script, node) else "modulo"
    rank = place.last.rank
    is_rank = (
        value.const == rank
        if isinstance(value.const, int)
        else str(value.const) in {f"cuda:{rank}", f"xpu:{rank}", f"npu:{rank}"}
    )
    return (
        "bare" if place.num_ranks > 1 and rank > 1 and is_rank and not isinstance(value.const, bool) else None
    )


def _has_modulo(script: Script, node: ast.AST | None) -> bool:
    return any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) and not _is_text(one.left)
        for one in parts_of_sources(script.tree, node)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _by_local_world(script: Script, node: ast.AST | None) -> bool:
    """`rank % LOCAL_WORLD_SIZE` is what torchrun itself computes."""
    words = " ".join(
        ast.unparse(one) for one in parts_of_sources(script.tree, node) if isinstance(one, ast.BinOp)
    ).lower()
    return "local_world" in words or "local_size" in words


def _is_certain(script: Script, place: Place, node: ast.AST | None) -> bool:
    """Whether the rank comes from where only the global one comes from, and not by a parameter of a function alone."""
    if place.entry.is_program:
        return True
    if _knows_both(place):
        return True
    names = {one.id for one in parts_of_sources(script.tree, node) if isinstance(one, ast.Name)}
    if any(role_of(name) == "rank" and _comes_by_parameter(place.last, name) for name in names):
        return False
    return any(
        _asks_rank(call) for history in place.entry.histories for call in history.calls[: place.last.index]
    )


def _knows_both(place: Place) -> bool:
    """Whether the group was made with the rank in question, and the local rank is another value."""
    calls = place.entry.histories[-1].calls
    starts = (call.arg(4, "rank") for call in calls if call.name == INIT)
    return any(rank is not None and rank.origin == {"rank"} for rank in starts) and any(
        value.origin == {"local_rank"} for call in calls for value in call.args
    )


def _comes_by_parameter(call: Call, name: str) -> bool:
    nodes = [getattr(call.function, "node", None), *(site.node for site in call.stack)]
    for node in nodes:
        args = getattr(node, "args", None)
        if isinstance(args, ast.arguments) and any(
            one.arg == name for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)
        ):
            return True
    return False


def _asks_rank(call: Call) -> bool:
    if call.name in _KNOWN_SOURCES or (call.name.startswith("?") and role_of(call.name) == "rank"):
        return True
    is_read = call.name in {"os.environ.__getitem__", "os.environ.get", "os.getenv"}
    return is_read and bool(call.args) and ENVIRON.get(str(call.args[0].const)) == "rank"
