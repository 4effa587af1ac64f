"""The verdict on jobs that hung, or failed over collectives that did not correspond; and its text at 2, 8 and 1024 ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Group
from rankwise.verdict.case import Case, RankEnd, Verdict
from rankwise.verdict.first_failure import judge
from rankwise.verdict.report import render, render_finding
from rankwise.verdict.run_rules import look
from scenes import NOW_S, buffers, elsewhere, ended, gradient, in_backward, in_call, op, rank, scene, stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.evidence.reader.scene import Scene

_OPEN = {"is_over": False}
_PEER = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer."
_ENFORCE = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at [pair.cc:456] op.preamble.length <= op.nbytes. 52 vs 4. Received data size doesn't match expected size."


def _end(number: int, code: int = -15, **facts: Any) -> RankEnd:
    stopped = {"stopped_s": 9.0} if code == -15 else {}
    return RankEnd(rank=number, local_rank=number, code=code, **{"ended_s": 10.0, **stopped, **facts})


def _raised(number: int, message: str, at: float = 8.0) -> RankEnd:
    fault = FaultRecord(message=message, callstack=message, monotonic_s=at, where="train.py:7")
    return _end(number, 1, ended_s=at + 0.1, fault=fault)


def _judge(*ends: RankEnd, **facts: Any) -> Verdict:
    return judge(Case(ranks=ends, world_size=len(ends), **facts))


def _sizes() -> Scene:
    return scene(rank(0, op(shape=(1,))), rank(1, op(shape=(50,), **_OPEN), at=in_call()))


def test_a_hang_that_we_ended_is_judged_by_what_was_seen() -> None:
    """The rank that did not come is named, and the job fails."""
    seen = scene(rank(0, gradient(), gradient(**_OPEN), at=in_backward()), rank(1, gradient(), at=elsewhere(12)))
    verdict = _judge(_end(0), _end(1), hung=True, scene=seen)
    assert (verdict.kind, verdict.culprits, verdict.class_id, verdict.exit_code) == ("hang", (1,), "D14", 1)
    assert verdict.where == "/job/train.py:12"
    assert [one.rank for one in verdict.waiting] == [0]
    assert [(one.rank, one.fate) for one in verdict.casualties] == [(0, "terminated by rankwise")]


def test_an_abort_without_words_in_a_mismatch_is_told_by_the_mismatch() -> None:
    """Where standard error is not read, what Gloo said is lost; an abort without a mismatch is the rank's own, and no last lines are promised."""
    verdict = _judge(_end(0, -6), _end(1), scene=_sizes())
    assert (verdict.kind, verdict.class_id, verdict.rule) == ("mismatch", "C5", "other_size")
    alone = _judge(_end(0, -6), _end(1))
    assert (alone.kind, alone.culprits) == ("failure", (0,))
    assert "last lines" not in alone.reason


def test_a_hang_in_which_nothing_was_seen_is_still_a_hang() -> None:
    """No record, no stack: it is said that the ranks did not move, and nobody is accused."""
    verdict = _judge(_end(0), _end(1), hung=True)
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("hang", (), 1)


def test_without_records_the_stacks_tell_who_was_elsewhere() -> None:
    """Two ranks were in a collective and one was not: it is the one to look at; where all were in one, nobody is."""
    ends = (_end(0, stack=in_call()), _end(1, stack=elsewhere(12)), _end(2, stack=in_call()))
    verdict = _judge(*ends, hung=True)
    assert (verdict.culprits, verdict.where) == ((1,), "/job/train.py:12")
    assert [one.rank for one in verdict.waiting] == [0, 2]
    assert _judge(ends[0], ends[2], hung=True).culprits == ()


def test_wrong_pairing_seen_earlier_explains_the_hang() -> None:
    """What was told while the ranks ran may be out of their rings when they hang."""
    early = look(scene(rank(0, op(dtypes=("int32",))), rank(1, op())))
    late = scene(rank(0, op(seq=5000, **_OPEN), at=in_call()), rank(1, op(seq=4999), at=elsewhere(12)))
    verdict = _judge(_end(0), _end(1), hung=True, scene=late, findings=early)
    assert (verdict.kind, verdict.class_id) == ("mismatch", "C7")


@pytest.mark.parametrize(
    "ends",
    [
        (_raised(0, _PEER), _end(1)),
        (_end(0, -6, last_words=_ENFORCE), _raised(1, _PEER)),
        (_raised(0, "RuntimeError: Timed out waiting 4000ms for recv operation to complete"), _end(1)),
    ],
    ids=["lost its peer", "Gloo aborted", "timed out"],
)
def test_a_failure_that_follows_from_a_mismatch_is_that_mismatch(ends: tuple[RankEnd, ...]) -> None:
    """Losing a peer, Gloo's abort, and a timeout are consequences."""
    verdict = _judge(*ends, scene=_sizes())
    assert (verdict.kind, verdict.class_id, verdict.culprits, verdict.where) == (
        "mismatch",
        "C5",
        (0, 1),
        "/job/train.py:7",
    )
    assert verdict.exit_code != 0


def test_an_own_exception_stays_the_cause() -> None:
    """A rank that raised is not excused by what its collectives were."""
    verdict = _judge(_raised(0, "ValueError: boom"), _end(1), scene=_sizes())
    assert (verdict.kind, verdict.culprits) == ("failure", (0,))
    assert "boom" in verdict.message


def test_an_interruption_stays_one() -> None:
    """Ctrl-C on a job that hangs is Ctrl-C."""
    assert _judge(_end(0), _end(1), scene=_sizes(), interrupted=2).stopped_by == "SIGINT"


@pytest.mark.parametrize("strict", [False, True])
def test_a_job_that_went_through_with_wrong_pairs_says_so(strict: bool) -> None:
    """All ranks exit with 0, and so does the launcher, unless it is told to be strict."""
    silent = scene(ended(0, op()), ended(1, op(dtypes=("int32",))))
    verdict = _judge(_end(0, 0), _end(1, 0), scene=silent, strict=strict)
    assert (verdict.kind, verdict.class_id, verdict.exit_code) == ("mismatch", "C7", int(strict))
    assert "is wrong" in verdict.notes[0]


def test_coming_through_by_luck_is_no_success() -> None:
    """C10: groups of different members that met all the same, by chance, fail the job although all exited with 0."""
    low, high = Group(name="1", ranks=(0, 1), backend="gloo"), Group(name="1", ranks=(1, 2), backend="gloo")
    seen = scene(ended(0, groups=(low,), world=3), ended(1, groups=(low,), world=3), ended(2, groups=(high,), world=3))
    verdict = _judge(*(_end(number, 0) for number in range(3)), scene=seen)
    assert (verdict.kind, verdict.class_id, verdict.exit_code) == ("mismatch", "C10", 1)


def test_a_job_that_went_through_is_ok_whatever_was_suspected() -> None:
    """A rank that was slow once, and was noted, is forgotten when all are through."""
    slow = look(scene(rank(0, op(**_OPEN), at=in_call()), rank(1, at=elsewhere(), is_asleep=False)))
    assert slow
    verdict = _judge(_end(0, 0), _end(1, 0), scene=scene(ended(0, op()), ended(1, op())), findings=slow)
    assert (verdict.kind, verdict.exit_code) == ("ok", 0)


def _hang_of(world: int) -> Scene:
    odd = world - 1
    ranks = [
        rank(number, gradient(57), gradient(57, shape=(25_600_000,), **_OPEN), at=in_backward(57), world=world)
        for number in range(odd)
    ]
    return scene(*ranks, rank(odd, gradient(57), at=elsewhere(41), world=world))


@pytest.mark.parametrize("world", [2, 8, 1024])
def test_a_hang_reads_as_agreed(world: int, golden: Callable[[str, str], None]) -> None:
    """The odd one first, and those that wait at one place in one line, however many they are."""
    ends = [_end(number, log=f"logs/{number}/stderr.log") for number in range(world)]
    text = render(_judge(*ends, hung=True, scene=_hang_of(world)))
    golden(f"sight_hang_{world}", text)
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize("world", [2, 8, 1024])
def test_a_mismatch_reads_as_agreed(world: int, golden: Callable[[str, str], None]) -> None:
    """Rank 1 evaluates alone, and the others are in a barrier."""
    ranks = [
        rank(number, gradient(9), op("barrier", at=13, **_OPEN), at=in_call("barrier", 13), world=world)
        for number in range(world)
    ]
    ranks[1] = rank(1, gradient(9), buffers(11, **_OPEN), at=in_call("_sync_buffers", 11), world=world)
    text = render(_judge(*map(_end, range(world)), hung=True, scene=scene(*ranks)))
    golden(f"sight_mismatch_{world}", text)
    assert len(text.splitlines()) < 20


def test_a_line_on_the_terminal_tells_for_how_long() -> None:
    """One line, with the seconds, and that it may be right; after a minute also what to do if it is not."""
    waiting = [rank(number, op(), op(entered_s=NOW_S - 12, **_OPEN), at=in_call(), world=4) for number in range(3)]
    finding = look(scene(*waiting, rank(3, op(), at=elsewhere(88), world=4, is_asleep=False)))[0]
    assert render_finding(finding, now_s=NOW_S) == (
        "rank 3 is busy (98 % CPU) at train.py:88; ranks 0-2 wait in all_reduce #2 ([4] float32) from train.py:7 "
        "(for 12 s now); it may just be slow"
    )
    assert finding.fix
    assert render_finding(finding, now_s=NOW_S + 50).endswith(f"; it may just be slow; if not: {finding.fix}")
    assert "\n" not in render_finding(replace(finding, message="a\nb"))


def test_what_was_seen_before_ctrl_c_is_told() -> None:
    """A proof that was said stays said, and what to do about it; what was only slow is said if it still is."""
    stuck = look(scene(_sizes().ranks[0], _sizes().ranks[1]))
    slow = look(scene(rank(0, op(**_OPEN), at=in_call()), rank(1, at=elsewhere(), is_asleep=False)))
    verdict = _judge(_end(0), _end(1), interrupted=2, findings=(*stuck, *slow))
    assert (verdict.stopped_by, verdict.culprits) == ("SIGINT", ())
    assert stuck[0].fix
    assert verdict.notes == (f"before that: {stuck[0].message}; {stuck[0].fix}",)
    last = scene(rank(0, op(**_OPEN), at=in_call()), rank(1, at=elsewhere(), is_asleep=False))
    assert _judge(_end(0), _end(1), interrupted=2, scene=last).notes == (
        f"before that: {slow[0].message}; {slow[0].fix}",
    )


def test_what_ends_no_job_brings_its_fix() -> None:
    """A stopped process is no reason to end the job, so no report follows: the line itself says how it goes on."""
    stopped = replace(rank(1, op(), at=elsewhere()), state="stopped", pid=4711)
    finding = look(scene(rank(0, op(), op(**_OPEN), at=in_call()), stopped))[0]
    assert (finding.rule, finding.is_stuck) == ("stopped_process", False)
    assert render_finding(finding, now_s=NOW_S).endswith("`kill -CONT 4711` lets it continue")


def test_a_wait_that_has_just_begun_is_nothing_that_was_wrong_before_ctrl_c() -> None:
    """Of two healthy ranks one is a little behind at any moment: nobody is told of it who ends the job."""
    ahead = rank(0, op(entered_s=NOW_S - 0.5, **_OPEN), at=in_call())
    last = scene(ahead, rank(1, at=elsewhere(), is_asleep=False))
    assert look(last)
    assert _judge(_end(0), _end(1), interrupted=2, scene=last).notes == ()


def test_a_stopped_rank_is_told_beside_a_failure() -> None:
    """Two causes: rank 1 is stopped, and rank 3 ended without rank 2."""
    pairs = [Group(name=str(1 + number), ranks=(2 * number, 2 * number + 1), backend="gloo") for number in (0, 1)]
    own: list[dict[str, Any]] = [{"groups": (pairs[number // 2],), "world": 4} for number in range(4)]
    seen = scene(
        rank(0, op(group="1", **_OPEN), at=in_call(), **own[0]),
        rank(1, state="stopped", **own[1]),
        rank(2, op(group="2", **_OPEN), at=in_call(), **own[2]),
        ended(3, **own[3]),
    )
    verdict = _judge(_end(0), _end(1), _raised(2, _PEER), _end(3, 0, ended_s=7.0), scene=seen)
    assert [note for note in verdict.notes if note.startswith("also: rank 1 is stopped")]


def test_who_lost_the_peer_that_we_stopped_does_not_hide_the_hang() -> None:
    """Of two ranks in a circle one is stopped first, and the other one complains before it is its turn."""
    one, two = (rank(number, op("send", peer=1 - number, **_OPEN), at=in_call("send")) for number in (0, 1))
    verdict = _judge(_end(0), _raised(1, _PEER), hung=True, scene=scene(one, two))
    assert (verdict.kind, verdict.class_id, verdict.culprits) == ("hang", "C9", (0, 1))


def test_a_stopped_rank_is_named_where_nothing_else_is_known() -> None:
    """No rank waits in what was recorded, and yet one of them can't move."""
    verdict = _judge(_end(0), _end(1), hung=True, scene=scene(rank(0), rank(1, state="stopped")))
    assert (verdict.culprits, "kill -CONT" in verdict.fix) == ((1,), True)


def test_a_models_comparison_with_what_is_none_is_not_believed() -> None:
    """DDP says that the models differ: it compared rank 0's with another collective of rank 1."""
    text = "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 19 params."
    told = {"shape": (1,), "dtypes": ("int64",)}
    checking = op("all_gather", at=9, inside=("__init__", "_verify_param_shape_across_processes"), source="native", **told)  # fmt: skip
    seen = scene(rank(0, checking), rank(1, op("all_gather", at=8, **told)))
    verdict = _judge(_raised(0, text), _end(1), scene=seen)
    assert (verdict.kind, verdict.class_id) == ("mismatch", "D13")
    alike = scene(rank(0, checking), rank(1, checking))
    assert _judge(_raised(0, text), _end(1), scene=alike).class_id == "D12"


def test_a_job_that_ended_well_did_not_fail() -> None:
    """Exit code 0 with wrong pairs: the head says what was wrong, and of no failure."""
    silent = scene(ended(0, op()), ended(1, op(dtypes=("int32",))))
    text = render(_judge(_end(0, 0), _end(1, 0), scene=silent))
    assert text.startswith("rankwise: the job finished, but the ranks diverged\n")
    strict = render(_judge(_end(0, 0), _end(1, 0), scene=silent, strict=True))
    assert strict.startswith("rankwise: the job failed: the ranks diverged\n")


def test_a_silent_exit_is_told_with_the_last_collective_before_it() -> None:
    """os._exit(3) leaves no line: what the rank did last is known from its records."""
    seen = scene(rank(0, op(), op(**_OPEN), at=in_call()), ended(1, op(at=12), code=3))
    verdict = _judge(_end(0), _end(1, 3, ended_s=7.0), scene=seen)
    assert (verdict.kind, verdict.culprits, verdict.where) == ("failure", (1,), "/job/train.py:12")
    told = "ended with exit code 3; its last collective was all_reduce #1 ([4] float32) at train.py:12"
    assert told in verdict.message
    # The exit may stand above the collective in the text, and run after it all the same.
    assert "(os._exit, sys.exit), anywhere in what runs once train.py:12 has run" in verdict.fix
    assert _judge(_end(0), _end(1, 3, ended_s=7.0)).fix == ""
    noted = _judge(_end(0), _end(1, 3, ended_s=7.0, left_at="/job/train.py:20"), scene=seen)
    assert noted.where == "/job/train.py:20"
    assert told in noted.message
    assert noted.fix.startswith("it left by the exit call at train.py:20: raise an exception there")


def test_a_rank_that_worked_alone_beyond_the_time_out_is_told_as_such() -> None:
    """X14: the others gave up while rank 0 prepared data under a test of the rank; without the test no class is named."""
    text = "rank = dist.get_rank()\nif rank == 0:\n    prepare()\ndist.barrier()\n"
    ranks = (
        rank(0, at=elsewhere(3), is_asleep=False),
        rank(1, op("barrier", at=4, **_OPEN), at=in_call("barrier", 4)),
    )
    ends = (
        _end(0, stack=elsewhere(3)),
        _raised(1, "RuntimeError: Timed out waiting 3000ms for recv operation to complete"),
    )
    verdict = _judge(*ends, scene=scene(*ranks, sources={"/job/train.py": text}))
    assert (verdict.kind, verdict.culprits, verdict.class_id) == ("hang", (0,), "X14")
    assert _judge(*ends, scene=scene(*ranks)).class_id is None
    slow = look(scene(*ranks, sources={"/job/train.py": text}))[0]
    assert (slow.certainty, slow.class_id) == ("suspicion", "X14")
    assert "X14" not in render_finding(slow)


def test_a_rank_at_its_exit_is_no_sleeper() -> None:
    """What it had registered for its exit runs; the exception that led there is told, and a line of Python's own is nobody's."""
    fault = FaultRecord(message="ValueError: boom\nmore", callstack="", where="/job/train.py:12")
    leaving = rank(1, op(), at=stack(at=3, function="cleanup"), fault=fault)
    waiting = rank(0, op(), op(**_OPEN), at=in_call())
    assert look(scene(waiting, leaving))[0].message.startswith(
        "rank 1 is at its exit after ValueError: boom, at train.py:3;"
    )
    pythons = Stack(frames=(Frame(file="/usr/lib/python3.11/threading.py", line=9, function="_shutdown"),))
    assert look(scene(waiting, rank(1, op(), at=pythons, fault=fault)))[0].where == "/job/train.py:12"


def test_the_rule_is_named_where_one_has_seen_it() -> None:
    """In the report as JSON, and as the page to read; a failure has none."""
    verdict = _judge(_end(0), _end(1), hung=True, scene=_hang_of(2))
    assert verdict.to_json()["rule"] == "fewer_steps"
    assert "rankwise rule fewer_steps" in render(verdict)
    failed = _judge(_raised(0, "ValueError: boom"), _end(1))
    assert failed.to_json()["rule"] is None
    assert "docs/rules" not in render(failed)


@pytest.mark.parametrize("odd", ["every second", "every seventh", "all waiting at lines of their own"])
def test_a_thousand_ranks_fit_on_a_screen(odd: str) -> None:
    """Ranks apart from each other are counted, not listed, and of many places the first ones are shown."""
    world = 1024
    told = {"every second": 2, "every seventh": 7}.get(odd, world)
    ranks = [
        rank(number, op(at=57), op(at=57 + number % 100 * (told == world), **_OPEN), at=in_call(at=57), world=world)
        if number % told
        else rank(number, op(at=57), op("barrier", at=90, **_OPEN), at=in_call("barrier", 90), world=world)
        for number in range(world)
    ]  # fmt: skip
    verdict = _judge(*map(_end, range(world)), hung=True, scene=scene(*ranks))
    lines = render(verdict).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 700
    assert len({one.rank for one in verdict.waiting} | set(verdict.culprits)) == world


def test_many_ranks_apart_from_each_other_are_counted() -> None:
    """A few runs are named in full; of more the number, the first ones and the last one."""
    assert name_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert name_ranks(range(0, 24, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22"
    assert name_ranks(range(0, 1024, 2)) == "512 ranks (0, 2, 4, 6, 8, 10, … 1022)"
    assert name_ranks(range(0, 1024, 2), None).endswith(", 1020, 1022")
