"""A rank, or the number of ranks, is not what the launcher has set."""

from __future__ import annotations

import ast
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import in_step
from rankwise.lint.analyses.job_view import (
    INIT,
    SPAWN,
    above,
    backend_of,
    has_unread,
    is_constant,
    is_for_several,
    is_spawned,
    launcher_reads,
    node_in,
    once,
    places,
    settings,
    starts_group,
    text_of,
)
from rankwise.lint.analyses.options import options, text_given
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.notes import TextTest
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.analyses.options import Option
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Script


@rule("RW204", "error", "I26", "a rank from the environment is a string but is compared with a number")
def rank_compared_as_text(script: Script) -> Iterator[Found]:
    for note in script.notes:
        if not isinstance(note, TextTest) or note.module is not script.module:
            continue
        if isinstance(note.node, ast.Compare):
            yield _tell_comparison(note.node, text_is_left=not _is_number(note.node.left))
        else:
            text = text_of(note.node.operand if isinstance(note.node, ast.UnaryOp) else note.node)
            message = f'`{text}` is a string, and "0" counts as true: `{text_of(note.node)}` is {"false" if note.negated else "true"} on every rank'
            yield Found(note.node, message, f"compare int({text}) with 0")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not isinstance(node.value, str)


def _tell_comparison(node: ast.Compare, *, text_is_left: bool) -> Found:
    text = node.left if text_is_left else node.comparators[0]
    shown = text_of(text)
    if isinstance(node.ops[0], (ast.Lt, ast.Gt, ast.LtE, ast.GtE)):
        message = f"`{shown}` is a string from the environment: `{text_of(node)}` raises TypeError"
    elif isinstance(node.ops[0], (ast.Eq, ast.In)):
        message = f'`{shown}` is a string such as "0": `{text_of(node)}` is false on every rank'
    else:
        message = f'`{shown}` is a string such as "0": `{text_of(node)}` is true on every rank'
    return Found(node, message, f"compare int({shown})")


_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
#: Ways to meet, devices and libraries, which are no backends; and what is spelt like one, but another maker's.
_NEVER = frozenset({"tcp", "env", "file", "cuda", "cpu", "gpu", "ddp", "openmpi"})
_OTHERS = ("ccl", "cncl", "bkcl")
#: In a text with these a backend may be brought.
_BRINGS = ("register_backend", "importlib", "__import__", "torch.testing")


@rule("RW210", "error", "I12 I10", "world size, rank, backend and number of processes contradict each other")
def world_size_contradiction(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT, anywhere=True)):
        if place.last.has_star:
            continue
        if place.last.module is script.module:
            yield from _fixed(script, place)
            yield from _same_rank(script, place)
            yield from _local_rank(place)
            yield from _no_backend(script, place.last)
            yield from _not_numbered(place.last)
    for steps in in_step(script, INIT):
        ways = {backend_of(call): call for call in reversed(steps[0])}
        if len(ways) > 1 and None not in ways:
            shown = " and ".join(f"{one or 'none'} on rank {ways[one].rank}" for one in reversed(ways))
            fix = 'name one backend for all, as in "cpu:gloo,cuda:nccl"'
            yield Found(steps[0][-1].node, f"ranks make one group with {shown}: they never connect", fix)


def _no_backend(script: Script, call: Call) -> Iterator[Found]:
    """A slip of a backend's name, or a word that is none, where no library is imported that may bring it."""
    node = call.arg_node(0, "backend")
    names = [one.rpartition(":")[2] for one in (text_given(call.arg(0, "backend"))[0] or "").lower().split(",")]
    odd = next((one for one in names if one in _NEVER or _is_slip(one)), None)
    if (
        node is not None
        and odd is not None
        and not has_unread(script.tree, {call.module for call in script.all_calls})
        and not any(word in script.unit.code for word in _BRINGS)
        and not is_caught(script.tree, node)
        and not any("version" in ast.unparse(test) for test, _, _ in call.tests)
    ):
        message = f"torch.distributed has no backend {odd!r}: every rank fails here"
        fix = 'use "gloo" for tensors on the CPU, "nccl" for those on GPUs, or leave the backend out'
        yield Found(node, message, fix, failure_class="")


def _not_numbered(call: Call) -> Iterator[Found]:
    """An address or a file to meet at that says nothing of the rank: the environment is not read then."""
    node, (url, _) = call.arg_node(1, "init_method"), text_given(call.arg(1, "init_method"))
    missing = [
        name
        for at, name in ((4, "rank"), (3, "world_size"))
        if call.arg(at, name) is None and f"{name}=" not in (url or "")
    ]
    if node is not None and url is not None and url.startswith(("tcp://", "file://")) and missing:
        message = f"init_method={url!r} needs {' and '.join(missing)} as well: only env:// reads that from the environment; it raises"
        yield Found(node, message, f"pass {' and '.join(missing)}, or use env:// under a launcher")


def _is_slip(name: str) -> bool:
    is_close = bool(get_close_matches(name, _BACKENDS, 1, 0.7))
    return is_close and name not in _BACKENDS and not name.endswith(_OTHERS)


def _fixed(script: Script, place: Place) -> Iterator[Found]:
    call = place.last
    size, rank = call.arg(3, "world_size"), call.arg(4, "rank")
    node = call.arg_node(3, "world_size")
    if size is None or node is None or not is_constant(size):
        return
    reported = {setting.key: setting.value.const for setting in settings(script) if setting.place.entry is place.entry}
    in_environment = reported.get("WORLD_SIZE")
    started = _num_started(place)
    if isinstance(in_environment, str) and in_environment.isdigit() and int(in_environment) != size.const:
        other = f"WORLD_SIZE is set to {in_environment}"
    elif (
        started is not None
        and is_spawned(call)
        and not call.guards  # of four processes, two may form a group of their own
        and started != size.const
        and rank is not None
        and "node_rank" not in rank.origin
        and rank.const == call.rank
    ):
        other = f"mp.spawn starts {started} processes"
    elif rank is not None and "rank" in rank.origin and not is_spawned(call) and size.const == 1:
        other = f"rank is `{text_of(call.arg_node(4, 'rank'))}`, different in each process"
    else:
        return
    yield Found(
        node,
        f"world_size is {size.const} here, but {other}: the ranks wait for each other, or never connect",
        "take both from the same place",
    )


def _same_rank(script: Script, place: Place) -> Iterator[Found]:
    """A constant rank in a script whose processes get their rank, or which several processes run."""
    call = place.last
    rank, size, node = call.arg(4, "rank"), call.arg(3, "world_size"), call.arg_node(4, "rank")
    if rank is None or size is None or node is None or call.tests or call.guards or not is_constant(rank):
        return
    is_fixed, fix = is_constant(size) and size.const > 1, 'pass int(os.environ["RANK"])'
    how = ""
    if is_spawned(call) and is_fixed and (_num_started(place) or 0) > 1:
        how, fix = "that mp.spawn starts ", "pass the first argument that mp.spawn gives"
    elif is_fixed and not is_spawned(call) and place.entry.is_program and is_for_several(place):
        how = "that runs this "
    elif "world_size" in size.origin and launcher_reads(script):
        how = "that the launcher starts "
    if how:
        message = f"each process {how}says that it is rank {rank.const}: they never form a world of {size.const if is_fixed else 'that size'}"
        yield Found(node, message, fix, failure_class="I10")


def _local_rank(place: Place) -> Iterator[Found]:
    """The number on the node in the place of the number in the job."""
    call = place.last
    rank, size, node = call.arg(4, "rank"), call.arg(3, "world_size"), call.arg_node(4, "rank")
    if (
        node is not None
        and rank is not None
        and rank.origin == {"local_rank"}
        and (size is None or "world_size" in size.origin)
    ):
        message = f"`{text_of(node)}` is the local rank: with two nodes, two processes say that they are rank 0, and the job never starts"
        yield Found(node, message, 'pass int(os.environ["RANK"])', severity="warning", failure_class="I10")


def _num_started(place: Place) -> int | None:
    for call in place.entry.histories[-1].calls:
        if call.name == SPAWN:
            number = call.arg(2, "nprocs")
            if number is not None and type(number.const) is int and not number.origin - {"agreed"}:
                return int(number.const)
    return None


_FIX = 'read int(os.environ["LOCAL_RANK"])'


@rule("RW217", "error", "L1", "the local rank is taken from the command line only")
def local_rank_from_command_line(script: Script) -> Iterator[Found]:
    if not any(
        word in script.unit.code
        for word in ("init_process_group", "init_distributed", "DistributedDataParallel", "Accelerator")
    ):
        return
    # DeepSpeed's own launcher passes it.
    if any(call.name.startswith("deepspeed.") or (call.name == INIT and _by_hand(call)) for call in script.all_calls):
        return
    has_environment = any("LOCAL_RANK" in one.module.text for one in script.all_calls)
    for option in options(script):
        if {flag.lstrip("-").replace("-", "_") for flag in option.flags} & {"local_rank"}:
            reported = _tell(script, option, has_environment=has_environment)
            if reported is not None and (node := node_in(script, option.call)) is not None:
                yield Found(node, reported[0], _FIX, severity="error" if reported[1] else "warning")
    if not has_environment:
        yield from _scans(script)
        yield from _decorated(script)


def _by_hand(init: Call) -> bool:
    """Whether processes that are started by hand are given their rank, and where to meet."""
    method = init.arg(1, "init_method")
    return init.arg(4, "rank") is not None and method is not None and "env://" not in str(method.const)


def _tell(script: Script, option: Option, *, has_environment: bool) -> tuple[str, bool] | None:
    flag = next((one for one in option.flags if "local" in one), option.flags[0])
    if option.is_required:
        return f"{flag} is required, and torchrun does not pass it: the program ends at once", True
    is_used = any(isinstance(node, ast.Attribute) and node.attr == option.dest for node in ast.walk(script.tree))
    default = option.default
    if has_environment or not is_used or (default is not None and not (default.is_known and not default.origin)):
        return None
    shown = repr(default.const) if default is not None else "None"
    # With None as the default the script can see that it was not given.
    texts = {script.tree, *(call.module.tree for call in script.all_calls)}
    nodes = (one for text in texts for one in ast.walk(text))
    tests = [one.test for one in nodes if isinstance(one, (ast.If, ast.IfExp, ast.Assert))]
    is_sure = shown != "None" or not any(option.dest in ast.unparse(test) for test in tests)
    # torch.distributed.launch, which such a script may be for, passes it in this spelling.
    is_sure = is_sure and flag != "--local-rank"
    return f"torchrun does not pass {flag}: args.{option.dest} stays {shown} in all processes", is_sure


def _scans(script: Script) -> Iterator[Found]:
    """``for arg in sys.argv: if arg.startswith("--local_rank=")``."""
    if "argv" not in script.unit.code:
        return
    for node in ast.walk(script.tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        declared = [one for option in options(script) for one in ast.walk(option.call.node)]
        if text.rstrip("= ") in {"--local_rank", "--local-rank"} and node not in declared:
            message = "torchrun does not pass --local_rank on the command line: this is never set"
            yield Found(node, message, _FIX)
            return


def _decorated(script: Script) -> Iterator[Found]:
    """``@click.option("--local_rank", default=0)``."""
    for call in script.calls_of("click.option"):
        flag = next((one.const for one in call.args if one.const in ("--local_rank", "--local-rank")), None)
        if flag is not None and "envvar" not in call.kwargs:
            message = f"torchrun does not pass {flag}: it keeps its default in all processes"
            yield Found(call.node, message, _FIX)


_SPAWNS = frozenset({SPAWN, "torch.multiprocessing.start_processes"})


@rule("RW220", "error", "I24", "a script of which a launcher starts each rank starts ranks itself")
def ranks_start_ranks(script: Script) -> Iterator[Found]:
    for entry in filter(lambda one: one.is_program, script.entries):
        calls = [call for call in entry.histories[0].calls if "spawned" not in call.contexts]
        # Without a process group of their own they may be workers of any kind.
        is_group = any(starts_group(call) and "spawned" in call.contexts for call in entry.histories[0].calls)
        for call in calls if is_group else ():
            number = call.arg(2, "nprocs")
            is_sure = call.name in _SPAWNS and call.module is script.module and not (call.tests or call.guards)
            if not is_sure or (number is not None and number.const == 1):
                continue
            if script.unit.num_ranks > 1:
                how = f"the command starts {script.unit.num_ranks} processes of it"
            elif any(_needs_launcher(one) for one in calls[: call.index]) and not any(map(_changes, calls)):
                how = "only a launcher sets the LOCAL_RANK that it reads"
            else:
                continue
            yield Found(
                call.node,
                f"each rank starts ranks of its own here, although {how}: they take each other's ports and GPUs",
                "call the function itself, with int(os.environ['LOCAL_RANK']), or start the script with plain python",
                severity="error" if number is not None and type(number.const) is int else "warning",
            )


def _needs_launcher(call: Call) -> bool:
    """Whether a read of LOCAL_RANK ends the program where no launcher has set it."""
    is_read = call.name == "os.environ.__getitem__" and call.args[0].const == "LOCAL_RANK"
    tests = [one for one in above(call.module.tree, call.node) if isinstance(one, (ast.If, ast.Try))]
    # The test for `__main__` is true wherever the script is the program.
    return (
        is_read
        and bool(call.result.spread)
        and all(isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in tests)
    )


def _changes(call: Call) -> bool:
    return call.name in {"os.environ.setdefault", "os.environ.update", "os.putenv"}
