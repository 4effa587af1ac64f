"""Ranks look for each other at different or at taken addresses, or wait for each other too short or too long."""

from __future__ import annotations

import ast
import re
from datetime import timedelta
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    INIT,
    LOOPBACK,
    called_names,
    is_for_several,
    is_left,
    is_of_one_process,
    is_spawned,
    launcher_reads,
    once,
    places,
    settings,
    spawns,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.analyses.options import options, text_given
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Spread
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place, Setting
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_KEYS = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})


@rule("RW207", "error", "L12 I9", "constants overwrite the launcher's variables")
def launcher_variable_overwritten(script: Script) -> Iterator[Found]:
    found = [one for one in settings(script) if one.key in _KEYS]
    written, made = {one.key for one in found}, script.calls_of(INIT)
    is_set = {"RANK", "WORLD_SIZE"} <= written and set(launcher_reads(script)) <= written
    # Who gives itself the place of the only one meets nobody.
    if is_of_one_process(script) and (is_set or any({"rank", "world_size"} <= set(one.kwargs) for one in made)):
        return
    launched, needed = _is_launched(script, written), _is_needed(script, found)
    for one in found:
        if one.value.const is None or not one.value.is_known or one.value.spread or _asks_first(one):
            continue
        if is_left(script, one.place.entry):
            continue
        if one.value.origin & {"world_size", "local_world_size"} or _is_in_test(one.place.last):
            # Restored, or passed on by the process that starts the others; a test of one process.
            continue
        if (who := launched or needed.get(one.key)) is not None:
            yield _tell_launched(one, who)
        elif one.key == "MASTER_PORT" and _is_distributed(script):
            yield Found(
                one.node,
                f"each run uses port {one.value.const}: a second job on this host fails, or joins the first one",
                "let the launcher choose the port, or bind a free one once in the parent and pass it on",
                severity="warning",
                failure_class="I9",
            )
    yield from _fixed_addresses(script)


def _fixed_addresses(script: Script) -> Iterator[Found]:
    """`init_method="tcp://localhost:23456"` in a program that starts its own ranks, or whose ranks are started by hand."""
    for call in script.calls_of("torch.distributed.init_process_group"):
        method = call.arg(1, "init_method")
        text = method.const if method is not None else None
        by_hand = {"rank", "world_size"} <= set(call.kwargs) and call.kwargs["world_size"].const != 1
        if LOOPBACK.match(str(text)) and _FIXED_PORT.search(str(text)) and (by_hand or spawns(script)):
            yield Found(
                call.node,
                f"each run uses the port of {text}: a second job on this host fails, or joins the first one",
                "bind a free port once in the parent and pass it to the ranks"
                if spawns(script)
                else "take the address and the port from the command line, or start the ranks with torchrun, which chooses a port",
                severity="warning",
                failure_class="I9",
            )


def _is_distributed(script: Script) -> bool:
    return script.has_init or spawns(script)


def _is_launched(script: Script, written: set[str]) -> str | None:
    """How it is known that a launcher starts the script; None if it is not."""
    if spawns(script) or "SLURM_" in script.unit.code:
        return None
    read = [key for key in launcher_reads(script) if key not in written]
    if read:
        return f"the launcher that sets {read[0]}"
    text = ast.get_docstring(script.tree) or ""
    return "torchrun" if "torchrun" in text or "torch.distributed.run" in text else None


def _is_needed(script: Script, found: list[Setting]) -> dict[str, str]:
    """By variable, who must have set it for a program that several processes run, and that sets a part of what makes the group."""
    written = {one.key: one.value.const for one in found}
    for place in once(places(script, INIT)):
        call, method = place.last, place.last.arg(1, "init_method")
        if spawns(script) or not place.entry.is_program or not is_for_several(place) or "store" in call.kwargs:
            continue
        if method is not None and method.const not in {None, "env://"}:
            continue
        given = {"RANK": call.arg(4, "rank"), "WORLD_SIZE": call.arg(3, "world_size")}
        lacking = [key for key, value in given.items() if value is None and key not in written]
        size = given["WORLD_SIZE"].const if given["WORLD_SIZE"] is not None else written.get("WORLD_SIZE")
        if lacking:
            return dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), f"the launcher that sets {lacking[0]}")
        return {"RANK": "whoever starts the others"} if str(size).isdigit() and str(size) != "1" else {}
    return {}


def _asks_first(setting: Setting) -> bool:
    """Whether it is set only where a test of the environment has shown that it is not set."""
    call = setting.place.last
    tests = [*(node for node, _, _ in call.tests), *(guard.node for guard in call.guards)]
    return any(word in ast.unparse(node) for node in tests for word in ("environ", "getenv", "SLURM", "initialized"))


def _is_in_test(call: Call) -> bool:
    return getattr(getattr(call.function, "node", None), "name", "").startswith(("test_", "setUp"))


def _tell_launched(setting: Setting, launched: str) -> Found:
    key, const = setting.key, setting.value.const
    if key.startswith("MASTER"):
        message = f"{key} = {const!r} overwrites what {launched} set: ranks look for each other in the wrong place"
    else:
        message = f"{key} = {const!r} overwrites what {launched} set: all processes claim the same place"
    return Found(
        setting.node,
        message,
        f"remove the line, or use os.environ.setdefault({key!r}, {str(const)!r})",
        severity="warning" if key == "MASTER_ADDR" else "error",
    )


_STORE = "torch.distributed.TCPStore"
_FIXED_PORT = re.compile(r":[1-9]\d*$")
#: What each process draws for itself.
_DRAWN = frozenset({"own", "random"})


@rule("RW208", "error", "I27", "each process chooses its own rendezvous port")
def own_free_port(script: Script) -> Iterator[Found]:
    for place, value, node in _ports(script) if not is_of_one_process(script) else ():
        if value.spread is not Spread.LOCAL or not value.origin & _DRAWN or _asks_environment(place.last):
            continue
        if not is_spawned(place.last) and (spawns(script) or not place.is_made_by_all or not _starts_here(place)):
            continue
        drawn = [call for call in place.entry.histories[-1].calls if call.result.origin & _DRAWN]
        yield Found(
            node,
            f"each process draws its own port with {drawn[0].name.rpartition('.')[2] if drawn else ''}(): rank 0 listens where no other rank connects",
            "draw the port once in the parent and pass it on, or leave it to the launcher",
        )


def _ports(script: Script) -> Iterator[tuple[Place, Value, ast.AST]]:
    for setting in settings(script):
        if setting.key == "MASTER_PORT":
            statement = statement_of(script.tree, setting.node)
            yield (setting.place, setting.value, statement.value if isinstance(statement, ast.Assign) else setting.node)
    for place in once(places(script, INIT, _STORE)):
        serves = place.last.arg(3, "is_master") if place.last.name == _STORE else None
        if serves is not None and serves.const is True:
            continue  # the rank that serves the store draws the port and passes it to the others
        name = "init_method" if place.last.name == INIT else "port"
        value, node = place.last.arg(1, name), place.last.arg_node(1, name)
        if value is not None and node is not None:
            yield place, value, node


def _starts_here(place: Place) -> bool:
    """Whether the same process creates a group: a test's set-up may do so for processes that it starts."""
    return any(starts_group(call) for call in place.entry.histories[-1].calls[place.last.index :])


def _asks_environment(call: Call) -> bool:
    tests = " ".join(text_of(node) for node, _, _ in call.tests)
    return "environ" in tests or "getenv" in tests


_MULTICAST = re.compile(r"(tcp://)?2(2[4-9]|3\d)(\.\d+){3}\b")
_NODES = frozenset(
    {"nodes", "nnodes", "num_nodes", "n_nodes", "num_machines", "nnode", "node_count", "NUM_NODES", "NNODES"}
)
_CLUSTER = frozenset({"SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NODEID"})


@rule("RW209", "error", "I4", "the rendezvous is at an address where the nodes do not meet")
def localhost_on_several_nodes(script: Script) -> Iterator[Found]:
    found = list(_addresses(script))
    for _, value, node in found:
        address, is_default = text_given(value)
        if _MULTICAST.match(address or ""):
            yield Found(
                node,
                f"{address!r} is a multicast address, which no host has: rank 0 can't listen there",
                "give the first node's name or address",
                severity="warning" if is_default else "error",
            )
    here = [one for one in found if LOOPBACK.match(str(one[1].const)) and not _tested(one[0])]
    several = _several(script) if here else None
    if several is None:
        return
    why, is_certain, declared = several
    for place, value, node in here:
        if declared is None or not declared.excludes(place.last):  # else the cluster's nodes get another address
            yield Found(
                node,
                f"{value.const!r} is a different host on each node, and {why}: the nodes never connect",
                "give the first node's name or address",
                severity="error" if is_certain and place.entry.is_program else "warning",
            )


def _addresses(script: Script) -> Iterator[tuple[Place, Value, ast.AST]]:
    for setting in settings(script):
        if setting.key == "MASTER_ADDR":
            yield setting.place, setting.value, setting.node
    for place in once(places(script, INIT, _STORE)):
        position, name = (1, "init_method") if place.last.name == INIT else (0, "host_name")
        value, node = place.last.arg(position, name), place.last.arg_node(position, name)
        if value is not None and node is not None:
            yield place, value, node


def _several(script: Script) -> tuple[str, bool, Call | None] | None:
    """How it is known that there may be several nodes, whether there are, and the call that asks."""
    for option in options(script):
        if option.dest in _NODES:
            default = option.default.const if option.default is not None else None
            is_more = isinstance(default, int) and default > 1
            return (f"{option.flags[-1]} {'is ' + str(default) if is_more else 'may be more than 1'}", is_more, None)
    nodes = scopes_of(script.tree)
    assigned: list[ast.Assign | ast.AnnAssign] = [*nodes.all(ast.Assign), *nodes.all(ast.AnnAssign)]
    for node in assigned:
        if isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = getattr(target, "id", getattr(target, "attr", ""))
            if name in _NODES and node.value.value > 1:
                return f"{name} is {node.value.value}", True, None
    for call in script.all_calls:
        if (
            call.name in {"os.environ.__getitem__", "os.environ.get", "os.getenv"}
            and call.args
            and call.args[0].const in _CLUSTER
        ):
            return f"{call.args[0].const} is read", True, call
    return None


def _tested(place: Place) -> bool:
    return any("node" in ast.unparse(test).lower() or "environ" in ast.unparse(test) for test, _, _ in place.last.tests)


_FILES = "torch.distributed.FileStore"
_REMOVES = frozenset({"remove", "unlink", "rmtree", "mkdtemp", "TemporaryDirectory", "mkstemp", "NamedTemporaryFile"})


@rule("RW206", "warning", "I13", "all runs share one fixed init file")
def fixed_init_file(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT, _FILES)):
        call = place.last
        at = (0, "file_name") if call.name == _FILES else (1, "init_method")
        node, (path, is_default) = call.arg_node(*at), text_given(call.arg(*at))
        if path is None or node is None or (call.name == INIT and not path.startswith("file:")):
            continue
        if not _REMOVES.isdisjoint(called_names(script.tree)):
            return
        what = "is the default, so all runs share one file" if is_default else "is the same file for each run"
        shown = repr(path) if isinstance(node, ast.Constant) else f"`{text_of(node)}`"
        yield Found(
            node,
            f"{shown} {what}: one that was killed leaves it behind, and the next hangs; two at once join each other",
            'use "env://" under a launcher, or put the job\'s id into the path',
        )


_SHORT, _LONG = timedelta(seconds=30), timedelta(days=1)
#: What a timedelta takes by position begins with the days; who names these means them.
_DAYS = frozenset({"days", "weeks"})
_TESTS = frozenset({"test", "tests"})


@rule("RW215", "warning", "I20", "the process group's timeout is a few seconds, or days by mistake")
def odd_timeout(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT, "accelerate.InitProcessGroupKwargs")):
        at = 2 if place.last.name == INIT else None
        node, value = place.last.arg_node(at, "timeout"), place.last.arg(at, "timeout")
        made = value.made if value is not None else None
        length = _length(made) if made is not None else None
        if node is None or made is None or length is None:
            continue
        shown = text_of(made.node)
        is_test = _is_in_test(place.last) or not _TESTS.isdisjoint(re.split(r"\W|_", script.unit.path))
        if timedelta() < length < _SHORT and not is_test and "store" not in place.last.kwargs:
            message = f"`{shown}` is {length.total_seconds():g} s: a rank that loads, saves or compiles for longer ends the job, at any step"
            yield Found(node, message, "allow as many minutes as the slowest step may take")
        elif length > _LONG and _DAYS.isdisjoint(made.kwargs):
            message = f"`{shown}` is {length / _LONG:g} days: a hang is not reported before that"
            unit = f"name the unit that is meant: `timedelta(seconds={text_of(made.arg_node(0))})`"
            yield Found(node, message, unit if made.args else "allow as long as the slowest step may take")


def _length(call: Call) -> timedelta | None:
    """What a call of timedelta gives, if all that it takes is known."""
    if call.name != "datetime.timedelta" or call.has_star:
        return None
    try:
        return timedelta(*(one.const for one in call.args), **{name: one.const for name, one in call.kwargs.items()})
    except (TypeError, OverflowError):  # what is not known is no number
        return None
