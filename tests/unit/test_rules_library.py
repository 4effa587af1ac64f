"""A rank that calls rankwise's library alone: its wait is seen as what it is, whatever the others do meanwhile."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
from rankwise.evidence.reader.notes import LIBRARY_WAITS, Stack
from rankwise.evidence.reader.scene import Group
from rankwise.launcher.hang_timeout import waits
from rankwise.verdict.rank_state import find_state
from rankwise.verdict.run_rules import look
from scenes import NOW_S, elsewhere, ended, gradient, in_backward, in_call, op, rank, scene, stack

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts

_HERE = Path(rankwise.__file__).parent
_INSTALLED = "/env/lib/python3.11/site-packages/rankwise"
_RECORDER = (f"{_INSTALLED}/evidence/in_rank/intercept_calls.py", 140, "wait")
_OPEN = {"is_over": False}
#: The library's own group.
_SIDE = (Group(name="1", ranks=(0, 1), backend="gloo"),)
#: Where its functions are called from; those that make groups are tested by what they say themselves.
_CALLS = {"control.py": ("collectives.py", "all_reduce"), "main_first.py": ("context.py", "main_first")}
_WAITS = [(Path(file).name, name) for (file, name), wait in LIBRARY_WAITS.items() if wait != "rendezvous"]
#: What else blocks in the library, by file, and why it is not in the table.
_OTHER_WAITS = {
    ("checkpoint/agreeing.py", "_take_patiently"): "rank 0's, for a lock; the others exchange meanwhile",
    ("checkpoint/convert.py", "import_file"): "one process",
    (
        "checkpoint/saving.py",
        "run_after check finish_saves save wait",
    ): "what is written in the background; names who is silent",
    (
        "checkpoint/writing.py",
        "_read_part _wait_words part_with_others",
    ): "in a thread of its own; names who is silent",
    ("data/workers.py", "_follow"): "a worker's, for its parent",
    ("parallel/pipeline_engine.py", "infer _pass_on"): "a Work: recorded",
    ("train/loggers/kubeflow.py", "_speak"): "in a thread of its own",
    (
        "parallel/servers/coordinator.py",
        "_drive _wait",
    ): "the coordinator's, for its workers, with a bound; names the functions that are not done",
    ("parallel/servers/listener.py", "connect"): "a server or a coordinator, with a bound; names it",
    ("parallel/servers/setup.py", "wait_for_keys"): "what other ranks write into the store, with a bound",
    ("parallel/servers/worker.py", "_join"): "a server, with a bound; names it",
    (
        "parallel/servers/shard.py",
        "read",
    ): "in a thread of its own, for other workers' gradients, with a bound",
    ("runtime/child_shield.py", "_wrap_wait wait_or_kill"): "for a child",
    ("runtime/connecting.py", "_abandon find_gone give_up"): "single words to the store, for seconds",
    ("runtime/context.py", "_leave"): "who leaves waits for seconds",
    (
        "runtime/leaving.py",
        "destroy_groups finish_background leave_store",
    ): "who leaves waits for seconds",
    ("runtime/control.py", "_leave_word _name_missing"): "single words to the store, for seconds",
    ("runtime/serialization.py", "gather_into_parts send_and_receive"): "a Work: recorded",
    ("runtime/handshake.py", "_let_all_hear _look_out"): "inside joining._meet",
    ("runtime/reductions.py", "_wait"): "a Work: recorded",
    ("runtime/stop_vote.py", "wait_settled"): "for this rank's own thread, with a bound",
    ("runtime/stopping.py", "_name_silent _settle"): "in a thread of its own",
    ("runtime/stores.py", "_wait_listening open_store"): "inside joining._meet",
    ("runtime/main_first.py", "take_turns wait"): "a single word to the store; inside main_first._wait",
    ("train/loss_accumulator.py", "read"): "a Work: recorded",
    ("train/saving.py", "wait"): "as checkpoint/saving.py",
    ("train/trainer.py", "_finish"): "as checkpoint/saving.py",
    ("train/loss_weighting.py", "correct"): "a Work: recorded",
}


def _alone(file: str, name: str, at: int = 31, **facts: Any) -> RankFacts:
    """Return rank 0 inside a call of the library, which it alone has made."""
    path, function = _CALLS[file]
    frames = [(f"{_INSTALLED}/runtime/{file}", 240, name), (f"{_INSTALLED}/runtime/{path}", 90, function)]
    if file == "control.py":
        call = op(at=at, shape=(2,), group="1", inside=(f"rankwise.{function}",), **_OPEN)
        return _train(0, call, at=stack(_RECORDER, *frames, at=at), **facts)
    within = [
        ("/env/lib/python3.11/threading.py", 327, "wait"),
        (f"{_INSTALLED}/base/deadline.py", 60, "call_within"),
    ]
    return _train(0, at=stack(*within, *frames, at=at), **facts)


def _train(number: int, *more: Op, at: Stack, **facts: Any) -> RankFacts:
    """Return a rank that has made a step by DDP, as all others have, and then something else."""
    return rank(number, gradient(27), *more, at=at, groups=_SIDE, steps=1, **facts)


def _backward(number: int) -> RankFacts:
    return _train(number, gradient(27, **_OPEN), at=in_backward(27))


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_others_in_ddp_are_a_proof(file: str, name: str) -> None:
    """Each waits for the other: told as the two places in the script, and not as a compiler or a loader that is slow."""
    findings = look(scene(_alone(file, name), _backward(1)))
    call = f"rankwise.{_CALLS[file][1]}"
    assert [(one.rule, one.certainty, one.is_stuck) for one in findings] == [("mispaired_gradients", "proof", True)]
    assert f"rank 0 is in {call} at train.py:31" in findings[0].message
    assert "rank 1 is in all_reduce ([20] float32, DDP gradients) at train.py:27" in findings[0].message


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_under_a_rank_test_the_test_is_named(file: str, name: str) -> None:
    """C1, as for a collective of torch in that place."""
    text = "\n" * 29 + "if rank == 0:\n    call()\n"
    sources = {"/job/train.py": text}
    findings = look(scene(_alone(file, name), _backward(1), sources=sources))
    assert [(one.class_id, one.culprits) for one in findings] == [("C1", (0,))]
    assert "move the collective at train.py:31 out of the rank test at line 30" in findings[0].fix


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_others_in_a_collective_of_torchs_are_a_proof(file: str, name: str) -> None:
    """Both are told by the names that users know."""
    other = _train(1, op("barrier", at=40, **_OPEN), at=in_call("barrier", 40))
    findings = look(scene(_alone(file, name), other))
    assert [(one.rule, one.certainty, one.is_stuck) for one in findings] == [("other_op", "proof", True)]
    assert f"rank 0 is in rankwise.{_CALLS[file][1]} at train.py:31; rank 1 is in barrier at" in findings[0].message


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_others_that_have_ended_or_are_stopped_are_named(file: str, name: str) -> None:
    """Who is missed, and where the rank waits for it."""
    alone = _alone(file, name)
    gone = ended(1, gradient(27), groups=_SIDE)
    frozen = rank(1, gradient(27), at=None, groups=_SIDE, state="stopped")
    for other, rule in ((gone, "member_ended"), (frozen, "stopped_process")):
        findings = look(scene(alone, other))
        assert [(one.rule, one.certainty) for one in findings] == [(rule, "proof")]
        assert f"rank 0 waits in rankwise.{_CALLS[file][1]} from train.py:31" in findings[0].message
        assert 1 in findings[0].culprits


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_others_at_work_may_still_come(file: str, name: str) -> None:
    """No proof: rank 1 computes, and rank 0 waits for it."""
    findings = look(scene(_alone(file, name), _train(1, at=elsewhere(50), is_asleep=False)))
    assert {(one.rule, one.certainty) for one in findings} <= {("kept_waiting", "suspicion")}


def test_a_first_rank_on_each_node_is_no_circle() -> None:
    """Two ranks are outside of main_first: for which of them the others wait is not known, and nothing is proved."""
    at = _alone("main_first.py", "_wait").stack
    waiting = [rank(number, gradient(27), at=at, world=4) for number in (0, 1)]
    there = [rank(number, gradient(27), gradient(27, **_OPEN), at=in_backward(27), world=4) for number in (2, 3)]
    assert not [one for one in look(scene(*waiting, *there)) if one.is_proof]


@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_a_wait_for_the_same_call_counts_for_the_bound(file: str, name: str) -> None:
    """--hang-timeout asks whether a rank waits. For the first rank's block it may: for a download, with a bound of its own."""
    facts = _alone(file, name)
    assert waits(facts) == (file == "control.py")
    assert facts.stack is not None
    assert facts.stack.op == f"rankwise.{_CALLS[file][1]}"
    assert find_state(facts).wait == "library"


@pytest.mark.parametrize("dumped_s", [NOW_S - 100, None])
@pytest.mark.parametrize(("file", "name"), _WAITS)
def test_old_records_prove_nothing(file: str, name: str, dumped_s: float | None) -> None:
    """Rank 0 may have sent its gradients from C++ before it came to the library's call."""
    findings = look(scene(_alone(file, name, dumped_s=dumped_s), _backward(1)))
    assert not [one for one in findings if one.is_proof]


@pytest.mark.parametrize("function", ["all_reduce", "broadcast", "barrier"])
def test_a_folder_of_that_name_hides_nothing(function: str) -> None:
    """An environment may stand in somebody's clone of rankwise: torch's waits there are torch's."""
    above = "/home/me/rankwise/.venv"
    at = in_call(function)
    moved = Stack(frames=tuple(replace(one, file=one.file.replace("/env", above)) for one in at.frames))
    assert moved.op == at.op == function
    assert find_state(rank(0, op(function, **_OPEN), at=moved)).wait == "call"


@pytest.mark.parametrize(
    ("room", "function", "said"),
    [
        ("checkpoint/saving.py", "save", "rankwise.checkpoint.save"),
        ("train/trainer.py", "fit", "rankwise.fit"),
        ("data/loader.py", "__iter__", "rankwise.loader"),
    ],
)
def test_a_stack_names_the_call(room: str, function: str, said: str) -> None:
    """As near to the name that users know as files and functions allow."""
    at = stack(_RECORDER, (f"{_INSTALLED}/runtime/control.py", 240, "_wait"), (f"{_INSTALLED}/{room}", 9, function))
    assert at.op == said


def test_a_work_that_the_library_waits_for_is_a_wait() -> None:
    """The Trainer's sums, or the parts of an object: a collective of torch that is recorded, waited for in a line of ours."""
    at = stack(_RECORDER, (f"{_INSTALLED}/train/loss_accumulator.py", 209, "read"), at=31)
    facts = rank(0, op(at=31, **_OPEN), at=at)
    assert find_state(facts).wait == "handle"
    assert waits(facts)
    assert find_state(facts).op is not None


def _find_blocking() -> set[tuple[str, str]]:
    """Return the functions of the library that block: by a wait, a sleep, or a call with a bound."""
    found = set()
    for room in ("runtime", "checkpoint", "data", "train", "parallel"):
        for path in (_HERE / room).rglob("*.py"):
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    names = {
                        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                        for node in ast.walk(function)
                        if isinstance(node, ast.Call)
                    }
                    if names & {"wait", "sleep", "call_within"}:
                        found.add((path.relative_to(_HERE).as_posix(), function.name))
    return found


def test_the_table_of_waits_is_complete() -> None:
    """A function of the library that blocks is in the table, or known to wait for something else."""
    known = {(file.removeprefix("/rankwise/"), name) for file, name in LIBRARY_WAITS}
    others = {(file, name) for file, names in _OTHER_WAITS for name in names.split()}
    assert _find_blocking() == known | others
