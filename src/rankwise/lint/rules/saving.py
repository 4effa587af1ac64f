"""A checkpoint is written by several ranks, read while it is written, or written by a signal handler in the middle of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import word_of
from rankwise.lint.analyses.in_ranks import is_in_ranks
from rankwise.lint.analyses.job_view import (
    ALL_RANKS,
    called_names,
    is_distributed,
    is_hidden,
    is_sequence,
    line_of,
    node_in,
    once,
    ops,
    places,
    starts_group,
    text_of,
)
from rankwise.lint.analyses.saved_files import is_chosen, is_write, plain_reads, reads, same_file, writes
from rankwise.lint.analyses.tensor_text import is_in
from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.analyses.turns import takes_turns
from rankwise.lint.analyses.wrapping import wraps
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.training import is_parallel
from rankwise.lint.interpreter.values import ANY
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.analyses.saved_files import FileUse
    from rankwise.lint.script import Script


@rule("RW601", "error", "K1", "every rank writes the same file")
def every_rank_saves(script: Script) -> Iterator[Found]:
    for use in writes(script, anywhere=True):
        call, entry, at = use.call, use.place.entry, node_in(script, use.call)
        is_but_one = use.place.ranks == ALL_RANKS - {0} and not call.tests
        if (
            at is None
            or not (use.place.is_made_by_all or is_but_one)
            or not is_distributed(entry)
            or is_chosen(call)
            or takes_turns(use.place)
            or not use.is_shared()
        ):
            continue
        if {"save_function", "is_main_process"} & call.kwargs.keys() or not is_in_ranks(script, entry, call):
            continue
        is_sure = (
            entry.is_program
            and not is_but_one  # of two ranks, it is one
            and all(is_in(script.tree, test) for test, _, _ in call.tests)
            and any(starts_group(one) for one in entry.histories[0].calls)
            and call.name != "builtins.open"
            and not is_parallel(call.receiver)  # of a sharded model each rank must save
            and not any(one.made is not None and is_hidden(one.made) for one in sources_of(use.path, cuts=False))
        )
        path = text_of(use.node)
        yield Found(
            at,
            f"every rank {'but 0 ' if is_but_one else ''}writes `{path}` at the same time: the file is damaged if their writes interleave",
            "let one rank write it: `if dist.get_rank() == 0:`, or include the rank in the path",
            severity="error" if is_sure else "warning",
        )


@rule("RW602", "warning", "K5 K1", "the first rank of each node writes the same file")
def first_of_each_node_saves(script: Script) -> Iterator[Found]:
    for use in writes(script, anywhere=True):
        call, at = use.call, node_in(script, use.call)
        if at is None or not use.place.is_once_a_node or not use.is_shared() or use.is_node_local():
            continue
        if {"save_function", "is_main_process"} & call.kwargs.keys() or "spawned" in call.contexts:
            continue
        if any("spawned" in guard.origin for guard in call.guards):
            continue
        yield Found(
            at,
            f"the first rank of each node writes `{text_of(use.node)}`: on a disk that nodes share, they write at the same time",
            "test the global rank: `if dist.get_rank() == 0:` (accelerator.is_main_process)",
        )


@rule("RW603", "error", "K2", "ranks read a file that rank 0 is still writing")
def read_before_written(script: Script) -> Iterator[Found]:
    written = [use for use in writes(script) if use.place.ranks == {0}]
    if not written:
        return
    for read in (*reads(script, anywhere=True), *plain_reads(script)):
        at = node_in(script, read.call)
        if (
            at is None
            or not {0} < read.place.ranks | {0}
            or read.place.ranks == {0}
            or not is_distributed(read.place.entry)
        ):
            continue
        for write in written:
            if (
                write.place.entry is read.place.entry
                and is_sequence(read.place.entry, write.call, read.call)
                and same_file(write.call, read.call)
                and not write.call.excludes(read.call)
                and _races(script, write, read)
            ):
                line = line_of(write.call)
                yield Found(
                    at,
                    f"rank 0 writes `{text_of(read.node)}` on line {line}, and the others may read it before that is done",
                    f"call dist.barrier() between line {line} and this line, on all ranks",
                )
                break


def _races(script: Script, write: FileUse, read: FileUse) -> bool:
    """Whether the others may reach the read before rank 0 has finished the write."""
    zero = next(history for history in write.place.entry.histories if history.rank == 0)
    reader = next(call for call in read.place.calls if call.rank != 0)
    other = next(history for history in read.place.entry.histories if history.rank == reader.rank)
    saving = write.place.calls[0]
    # In the order of the code: a file that is read at the start and written in the loop is another case.
    own = next((call for call in read.place.calls if call.rank == 0), None)
    if own is not None and own.index < saving.index:
        return False
    # A wrapper's constructor compares the shapes of all ranks.
    wrapping = {id(wrap.call.node) for wrap in wraps(script)}
    before, passed = (
        sum(op.call.index < call.index for op in ops(history.items))
        + sum(id(one.node) in wrapping for one in history.calls[: call.index])
        for history, call in ((zero, saving), (other, reader))
    )
    return passed <= before


_MOVES = frozenset({"replace", "rename", "renames", "move"})


@rule("RW604", "warning", "K2", "a checkpoint is overwritten in place, in the file that a resume reads")
def checkpoint_overwritten_in_place(script: Script) -> Iterator[Found]:
    read = list(reads(script))
    for use in writes(script):
        function = getattr(use.call.function, "node", None) or script.tree
        is_moved = not _MOVES.isdisjoint(called_names(function))
        if use.call.name != "torch.save" or not use.call.loops or use.changes_with_loop() or is_moved:
            continue
        resumed = next((one for one in read if same_file(one.call, use.call) and _is_resume(one, use)), None)
        if resumed is not None:
            path, line = text_of(use.node), line_of(resumed.call)
            yield Found(
                use.call.node,
                f"`{path}` is overwritten in place, and line {line} resumes from it: a crash during the write leaves neither the old nor the new file",
                f"write to {path} + '.tmp' first, then os.replace(...) it",
            )


def _is_resume(read: FileUse, write: FileUse) -> bool:
    """Whether the read comes before the loop: after it, it is the best model, not a resume."""
    if read.place.entry is not write.place.entry:
        return True
    return read.place.calls[0].index < write.place.calls[0].index


_EXITS = frozenset({"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit"})


@rule("RW610", "warning", "K9 R7", "a signal handler saves or waits for other ranks")
def work_in_signal_handler(script: Script) -> Iterator[Found]:
    for place in once(places(script, "signal.signal")):
        if is_distributed(place.entry):
            yield from _handled(place)


def _handled(place: Place) -> Iterator[Found]:
    made = place.last
    number, handler = (
        getattr(value.thing, "name", "") for value in (made.arg(0, "signalnum") or ANY, made.arg(1, "handler") or ANY)
    )
    inside = [
        call
        for history in place.entry.histories
        for call in history.calls
        if any(site.node is made.node for site in call.stack)
    ]
    met = next((call for call in inside if call.name in ACTS and ACTS[call.name].family), None)
    saved = next((call for call in inside if is_write(call)), None)
    if met is not None:
        message = (
            f"the handler calls {word_of(met)} in the middle of a step: other ranks are elsewhere and do not call it"
        )
        yield Found(made.node, message, _FIX, severity="error")
    elif saved is not None:
        message = f"the handler calls {word_of(saved)} in the middle of a step: it may save a partial update"
        yield Found(made.node, message, _FIX)
    elif number == "signal.SIGTERM" and any(call.name in _EXITS for call in inside):
        message = "the SIGTERM handler exits at once: all work since the last checkpoint is lost"
        yield Found(made.node, message, _FIX, failure_class="R7")
    elif number == "signal.SIGTERM" and handler == "signal.SIG_IGN":
        message = (
            "SIGTERM is ignored: on preemption the scheduler kills the job after its grace period, and nothing is saved"
        )
        yield Found(made.node, message, _FIX, failure_class="R7")


_FIX = "only set a flag in the handler; at the end of a step let all ranks agree on it, save, and exit"
