"""Who left first, and why: synthetic ends of jobs, each with its one right verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Frame, Problem, Stack
from rankwise.verdict.case import Case, LostNode, RankEnd, Verdict
from rankwise.verdict.exit_codes import is_abort_at_exit
from rankwise.verdict.first_failure import judge
from scenes import ended, in_call, op, rank as rank_facts, scene

_PEER = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:3: Connection reset by peer."
_ABORT = "terminate called without an active exception"
_STORE_WAIT = "torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//cpu//0/{}"
_TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def _end(rank: int, code: int | None = 0, at: float = 1.0, **facts: Any) -> RankEnd:
    return RankEnd(rank=rank, local_rank=rank, code=code, ended_s=at, **facts)


def _raised(rank: int, message: str, at: float = 1.0, where: str | None = "train.py:7", **facts: Any) -> RankEnd:
    fault = FaultRecord(message=message, callstack=f"Traceback\n{message}\n", monotonic_s=at, where=where)
    return _end(rank, **{"code": 1, "at": at + 0.2, "fault": fault, **facts})


def _stopped(rank: int, at: float = 2.0, **facts: Any) -> RankEnd:
    return _end(rank, **{"code": -15, "at": at + 0.1, "stopped_s": at, **facts})


def _in(function: str, line: int = 9) -> Stack:
    return Stack(
        frames=(
            Frame(file=_TORCH, line=1, function=function),
            Frame(file="train.py", line=line, function="main"),
        )
    )


def _judge(*ranks: RankEnd, **facts: Any) -> Verdict:
    return judge(Case(ranks=ranks, world_size=facts.pop("world_size", len(ranks)), **facts))


def _fates(verdict: Verdict) -> dict[int, str]:
    return {casualty.rank: casualty.fate for casualty in verdict.casualties}


def test_all_finished_is_ok() -> None:
    """Exit code 0 on all ranks is a success, and nobody is a casualty."""
    verdict = _judge(_end(0), _end(1))
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("ok", (), 0)
    assert verdict.exits == {0: 0, 1: 0}


def test_root_cause_is_first_not_loudest() -> None:
    """Ranks that lost their peer are gone earlier and print more, and are yet not the cause."""
    verdict = _judge(
        _raised(0, _PEER, at=1.05, last_words="x\n" * 100),
        _end(1, code=-6, at=1.06, last_words=f"terminate called\n  what():  {_PEER}"),
        _raised(2, "ValueError: boom", at=1.0, where="train.py:5"),
    )
    assert (verdict.kind, verdict.culprits, verdict.where) == ("failure", (2,), "train.py:5")
    assert "rank 2: ValueError: boom" in verdict.message
    assert _fates(verdict) == {0: "lost its peer", 1: "lost its peer"}
    assert "boom" in verdict.traceback


def test_ranks_that_claimed_one_place_are_named_and_not_who_left_first() -> None:
    """Two got through and ended, the third lost its peers: what one of them had found when they met is the cause, unless a rank raised."""
    text = "2 processes claim rank 1: pid 5 on h with LOCAL_RANK 1, pid 6 on h with LOCAL_RANK 2"
    problem = Problem(text=text, fix="don't set RANK", local_ranks=(1, 2))
    for fault in (_PEER, f"rankwise.HandshakeError: {text}"):
        verdict = _judge(_end(0), _end(1, problem=problem), _raised(2, fault, at=2.0))
        assert (verdict.message, verdict.culprits, verdict.class_id) == (text, (1, 2), "I10")
        assert verdict.fix == "don't set RANK"
    verdict = _judge(_raised(0, "ValueError: boom"), _end(1, problem=problem), _raised(2, _PEER, at=2.0))
    assert verdict.culprits == (0,)


def test_a_culprit_that_closes_its_connections_before_it_raises_is_found() -> None:
    """The peers' complaints may be older than the cause."""
    verdict = _judge(_raised(0, _PEER, at=1.0), _raised(1, "ValueError: boom", at=1.5))
    assert verdict.culprits == (1,)


@given(
    own=st.integers(0, 7),
    times=st.lists(st.floats(0, 100), min_size=8, max_size=8),
    stopped=st.sets(st.integers(0, 7)),
)
def test_one_own_error_among_peers_is_always_the_cause(own: int, times: list[float], stopped: set[int]) -> None:
    """Whatever the order of their ends, and whomever we stopped, the one rank with an error of its own is to blame."""
    ranks = []
    for rank, at in enumerate(times):
        if rank == own:
            ranks.append(_raised(rank, "ValueError: boom", at=at))
        elif rank in stopped:
            ranks.append(_stopped(rank, at=at))
        else:
            ranks.append(_raised(rank, _PEER, at=at))
    verdict = _judge(*ranks)
    assert (verdict.culprits, verdict.exit_code) == ((own,), 1)


def test_a_rank_that_we_stopped_never_hides_the_first() -> None:
    """What a rank does after our SIGTERM, raise or exit, is our doing."""
    verdict = _judge(
        _raised(0, "KeyboardInterrupt", at=2.1, stopped_s=2.0, code=1),
        _stopped(1),
        _raised(2, "ValueError: boom", at=1.0),
        _end(3, code=3, at=2.5, stopped_s=2.0),
    )
    assert verdict.culprits == (2,)
    assert _fates(verdict) == {
        0: "terminated by rankwise",
        1: "terminated by rankwise",
        3: "terminated by rankwise",
    }


def test_a_rank_that_failed_before_it_was_stopped_counts() -> None:
    """The moment of the exception decides, not the moment of the process's end."""
    verdict = _judge(_raised(0, "ValueError: boom", at=1.0, stopped_s=1.5, code=-9), _stopped(1))
    assert verdict.culprits == (0,)


def test_ranks_that_fail_alike_are_named_together() -> None:
    """The same exception at the same line on all ranks is one failure."""
    verdict = _judge(*(_raised(rank, f"KeyError: '{rank}'", at=1 + rank / 10) for rank in (1, 0, 2)))
    assert verdict.culprits == (0, 1, 2)
    assert verdict.message.startswith("all 3 ranks, rank 0 first")


def test_a_later_other_error_is_a_casualty() -> None:
    """An own error of another kind, later, failed later."""
    verdict = _judge(_raised(0, "ValueError: a", at=1.0), _raised(1, "KeyError: b", at=1.5, where="train.py:9"))
    assert (verdict.culprits, _fates(verdict)) == ((0,), {1: "failed later"})


def test_a_server_that_hangs_up_on_a_rank_is_its_own_failure() -> None:
    """A download reset by a server comes first, and another rank's later error does not take its place."""
    verdict = _judge(
        _raised(0, "KeyError: 'x'", at=1.5, where="train.py:30"),
        _raised(1, "ConnectionResetError: [Errno 104] Connection reset by peer", at=1.0, where="data.py:3"),
    )
    assert (verdict.culprits, verdict.where) == ((1,), "data.py:3")


def test_a_rank_that_left_early_with_0_is_the_cause() -> None:
    """R6/C27: peers need a rank that has ended; its exit code 0 does not excuse it."""
    verdict = _judge(_raised(0, _PEER, at=2.0), _end(1, 0, at=1.0), _stopped(2, at=2.1))
    assert (verdict.culprits, verdict.exit_code) == ((1,), 1)
    assert "exit code 0" in verdict.message
    assert verdict.where == "train.py:7"
    assert _fates(verdict) == {0: "lost its peer", 2: "terminated by rankwise"}


def test_ranks_left_behind_are_a_hang() -> None:
    """Living ranks idle in a collective after another has left: a hang, blamed on who left."""
    verdict = _judge(_stopped(0, stack=_in("all_reduce")), _end(1, 0, at=1.0), left_behind=True)
    assert (verdict.kind, verdict.culprits, verdict.where) == ("hang", (1,), "train.py:9")
    assert verdict.exit_code != 0
    assert [(waiting.rank, waiting.op) for waiting in verdict.waiting] == [(0, "all_reduce")]


def test_a_timeout_that_names_a_rank_blames_it() -> None:
    """A rank that never came to init is the cause, and its place is the one to look at."""
    verdict = _judge(_raised(0, _STORE_WAIT.format(1), at=4.0), _stopped(1, at=4.1, stack=_in("recv", line=3)))
    assert (verdict.kind, verdict.culprits, verdict.where) == ("hang", (1,), "train.py:3")
    assert _fates(verdict) == {0: "timed out"}


def test_ranks_that_miss_each_other_in_init_were_told_different_places() -> None:
    """L12: the absent rank is in init_process_group too, so somebody changed its address."""
    init = Stack(
        frames=(
            Frame(file=_TORCH, line=1, function="init_process_group"),
            Frame(file="t.py", line=4, function="f"),
        )
    )
    verdict = _judge(_raised(0, _STORE_WAIT.format(1), at=4.0), _stopped(1, at=4.1, stack=init))
    assert (verdict.culprits, verdict.class_id) == ((1,), "L12")


def test_a_monitored_barrier_names_its_absent_ranks() -> None:
    """R10: rank 0 knows who is missing; the others only heard of it."""
    told = "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting"
    verdict = _judge(
        _raised(0, "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms", at=2.1),
        _raised(1, told, at=2.0),
        _stopped(2, at=2.2, stack=Stack(frames=(Frame(file="train.py", line=5, function="f"),))),
        _stopped(3, at=2.2),
    )
    assert (verdict.kind, verdict.culprits, verdict.class_id) == ("hang", (2, 3), "R10")
    assert _fates(verdict) == {0: "timed out", 1: "lost its peer"}


def test_a_timeout_without_names_blames_who_was_elsewhere() -> None:
    """Of the ranks that did not complain, those in no collective are the cause."""
    verdict = _judge(
        _raised(0, "RuntimeError: Timed out waiting 4000ms for recv operation to complete", at=4.0),
        _stopped(1, at=4.1, stack=_in("all_reduce")),
        _stopped(2, at=4.1, stack=Stack(frames=(Frame(file="train.py", line=5, function="f"),))),
    )
    assert (verdict.kind, verdict.culprits, verdict.where) == ("hang", (2,), "train.py:5")


def test_a_rank_beyond_the_world_means_another_world_size() -> None:
    """I12: who waits for a rank that does not exist was told another world size, and is the cause."""
    verdict = _judge(
        _raised(1, _STORE_WAIT.format(2), at=3.0),
        _raised(0, "RuntimeError: Timed out waiting 4000ms for recv operation to complete", at=4.0),
    )
    assert (verdict.kind, verdict.culprits, verdict.class_id) == ("hang", (1,), "I12")
    assert "waited for rank 2, but this job has 2 ranks" in verdict.message


def test_a_mismatch_is_called_one() -> None:
    """C5: Gloo's abort over sizes is a mismatch of the ranks, not a crash."""
    what = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at [pair.cc:456] op.preamble.length <= op.nbytes. 52 vs 4. Received data size doesn't match expected size."
    verdict = _judge(_end(0, -6, at=1.0, last_words=what), _raised(1, _PEER, at=1.1))
    assert (verdict.kind, verdict.culprits, verdict.class_id, verdict.exit_code) == (
        "mismatch",
        (0,),
        "C5",
        134,
    )


_FATAL = (
    "Fatal Python error: Aborted\n\nCurrent thread 0x00007f0000000001 (most recent call first):\n  <no Python frame>\n\n"
    "Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)"
)


@pytest.mark.parametrize(
    ("facts", "forgiven"),
    [
        ({"finished_s": 0.9, "last_words": f"epoch 3\n{_ABORT}\n"}, True),
        ({"finished_s": 0.9, "last_words": f"{_ABORT}\n{_FATAL}"}, True),
        ({"last_words": _ABORT}, False),
        ({"finished_s": 0.9, "last_words": f"{_ABORT}\nmore"}, False),
        ({"finished_s": 0.9, "last_words": "terminate called after throwing an instance of 'std::runtime_error'"}, False),
        ({"finished_s": 0.9, "last_words": ""}, False),
        ({"finished_s": 0.9, "last_words": _ABORT, "code": -11}, False),
        ({"finished_s": 0.9, "last_words": _ABORT, "fault": FaultRecord(message="ValueError")}, False),
    ],
    ids=["plain", "with faulthandler on stderr (@record)", "not finished", "words after", "exception", "silent", "segv", "raised"],
)  # fmt: skip
def test_torchs_abort_at_exit_is_forgiven_only_after_the_work(facts: dict[str, Any], forgiven: bool) -> None:
    """pytorch#190489 counts as success when the script was through and the abort is that one, else never."""
    end = _end(0, **{"code": -6, **facts})
    assert is_abort_at_exit(end) == forgiven
    verdict = _judge(end, _end(1))
    assert verdict.kind == ("ok" if forgiven else "failure")
    assert verdict.exit_code == (0 if forgiven else verdict.exit_code or -1)
    assert bool(verdict.notes) == forgiven


def test_a_forgiven_abort_does_not_hide_a_failure() -> None:
    """Another rank's error stays the cause."""
    verdict = _judge(_end(0, -6, finished_s=0.5, last_words=_ABORT), _raised(1, "ValueError: boom", at=2.0))
    assert (verdict.culprits, verdict.exit_code) == ((1,), 1)
    assert _fates(verdict) == {0: "finished"}


def test_a_kill_for_memory_is_told() -> None:
    """R3: -9 with a raised oom_kill count is the kernel's; without it somebody else's."""
    verdict = _judge(_end(0, -9, at=1.0, last_words=_PEER), _raised(1, _PEER, at=1.1), oom_kills=1)
    assert (verdict.culprits, verdict.class_id, verdict.exit_code) == ((0,), "R3", 137)
    assert "ran out of memory" in verdict.reason
    # A script may have killed itself: nobody can know who sent it.
    assert "no OOM kill was counted for this job: SIGKILL (-9) probably" in _judge(_end(0, -9), _stopped(1)).reason


@pytest.mark.parametrize(
    ("code", "facts", "told"),
    [
        (-7, {"shm_free_bytes": 1 << 20}, "/dev/shm is full (1 MiB free)"),
        (-7, {"shm_free_bytes": 1 << 40}, "usually a full /dev/shm"),
        (-11, {}, "crash in native code"),
        (-77, {}, "signal 77"),
        (137, {}, "SIGKILL"),
        (127, {}, "command not found"),
        (3, {}, "exit code 3"),
    ],
)
def test_ends_are_explained(code: int, facts: dict[str, Any], told: str) -> None:
    """A bare exit code is put into words."""
    verdict = _judge(_end(0, code), _stopped(1), **facts)
    assert told in verdict.reason
    assert verdict.exit_code == (code if code > 0 else 128 - code)


def test_a_scripts_own_argument_parser_is_named() -> None:
    """Exit code 2 with a usage text is argparse; a flag --local-rank is class L1."""
    words = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local-rank=0"
    verdict = _judge(_end(0, 2, last_words=words), _stopped(1))
    assert "argument parser" in verdict.reason
    assert (verdict.class_id, verdict.exit_code) == ("L1", 2)


def test_a_lost_store_is_named() -> None:
    """Ranks that only lost their store are not to blame for it."""
    verdict = _judge(_stopped(0), _raised(1, _PEER, at=1.0), store_code=-9)
    assert (verdict.culprits, "store" in verdict.message, "SIGKILL" in verdict.reason) == ((), True, True)
    assert verdict.exit_code != 0


def test_a_rank_that_failed_first_beats_a_lost_store() -> None:
    """An own error is the cause even when the store is gone too."""
    assert _judge(_raised(0, "ValueError: boom"), _stopped(1), store_code=-9).culprits == (0,)


def test_a_lost_supervisor_is_named() -> None:
    """The ranks died with the supervisor: none is to blame."""
    ends = [_end(rank, -9, at=1.0, stopped_s=1.0) for rank in range(2)]
    verdict = _judge(*ends, supervisor_lost=True)
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("failure", (), 137)
    assert "supervisor" in verdict.message


def test_an_interruption_is_nobodys_fault() -> None:
    """Ctrl-C and SIGTERM end the job with 128 + N, whatever the ranks made of it."""
    verdict = _judge(_raised(0, "KeyboardInterrupt", at=2.1, stopped_s=2.0), _stopped(1), interrupted=15)
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("failure", (), 143)
    assert verdict.stopped_by == "SIGTERM"


def test_a_cause_on_another_node_is_not_pinned_on_ours() -> None:
    """With several nodes a rank that lost its peer points elsewhere."""
    verdict = _judge(_raised(0, _PEER), _stopped(1), num_nodes=2, world_size=4)
    assert (verdict.kind, verdict.culprits) == ("failure", ())
    assert "another node" in verdict.message
    assert verdict.exit_code == 1


def test_an_early_exit_is_not_assumed_on_several_nodes_when_all_of_ours_lost_a_peer() -> None:
    """No rank of ours left early: none is blamed."""
    verdict = _judge(_raised(0, _PEER), _raised(1, _PEER, at=1.1), num_nodes=2, world_size=4)
    assert verdict.culprits == ()


def test_a_timeout_for_a_rank_of_another_node_blames_none_of_ours() -> None:
    """Rank 3 lives elsewhere: our ranks that waited for it are not the cause."""
    verdict = _judge(_raised(0, _STORE_WAIT.format(3), at=4.0), _stopped(1, at=4.1), num_nodes=2, world_size=4)
    assert verdict.kind == "hang"
    assert 1 not in verdict.culprits


def test_the_report_is_json() -> None:
    """The report holds exactly what its readers know, `class` among it."""
    body = json.loads(json.dumps(_judge(_raised(0, "ValueError: boom"), _stopped(1)).to_json()))
    assert {"kind", "culprits", "class", "where", "waiting", "message", "fix", "exits", "logs"} <= set(body)
    assert (body["culprits"], body["exits"]) == ([0], {"0": 1, "1": -15})


_TEXTS = st.sampled_from(
    ["", "ValueError: x", _PEER, _ABORT, _STORE_WAIT.format(1), _STORE_WAIT.format(99), "Timed out waiting 1ms for recv",
     "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 2 ms", "\n\n", "Detected mismatch between collectives"]
)  # fmt: skip
_MOMENTS = st.floats(0, 10)


@st.composite
def _ends(draw: st.DrawFn) -> tuple[RankEnd, ...]:
    ends = []
    for rank in range(draw(st.integers(1, 4))):
        message = draw(_TEXTS)
        fault = FaultRecord(message=message, monotonic_s=draw(st.none() | _MOMENTS)) if draw(st.booleans()) else None
        ends.append(
            RankEnd(
                rank=rank, local_rank=rank, code=draw(st.sampled_from([0, 1, 2, -6, -9, -11, -15, 255, None])),
                ended_s=draw(_MOMENTS), stopped_s=draw(st.none() | _MOMENTS), fault=fault,
                finished_s=draw(st.none() | _MOMENTS), last_words=draw(_TEXTS),
                stack=draw(st.sampled_from([None, Stack(), _in("all_reduce"), _in("init_process_group")])),
            )
        )  # fmt: skip
    return tuple(ends)


@settings(max_examples=150, deadline=None)
@given(
    ranks=_ends(),
    facts=st.fixed_dictionaries(
        {
            "num_nodes": st.sampled_from([1, 2]),
            "interrupted": st.sampled_from([None, None, 2, 15]),
            "left_behind": st.booleans(),
            "store_code": st.sampled_from([None, None, 0, 1, -9]),
            "supervisor_lost": st.sampled_from([False, False, True]),
        }
    ),
)
def test_any_end_has_a_verdict(ranks: tuple[RankEnd, ...], facts: dict[str, Any]) -> None:
    """Every end is judged; each rank is either a culprit or a casualty; only ok exits with 0; codes fit a byte."""
    verdict = _judge(*ranks, **facts)
    if verdict.kind == "ok":
        assert (verdict.culprits, verdict.casualties, verdict.exit_code) == ((), (), 0)
        return
    assert sorted([*verdict.culprits, *_fates(verdict)]) == [end.rank for end in ranks]
    assert 0 < verdict.exit_code < 256
    assert verdict.message


def test_a_file_of_an_earlier_run_is_named() -> None:
    """I13: ranks that meet by a file and find nobody behind its addresses point to the file, not to each other."""
    text = "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused"
    line = '  File "train.py", line 6, in <module>\n    dist.init_process_group("gloo", init_method=f"file://{path}")\n'
    fault = FaultRecord(message=text, callstack=line, monotonic_s=1.0, where="train.py:6")
    verdict = _judge(_end(0, 1, at=1.2, fault=fault), _stopped(1))
    assert (verdict.class_id, verdict.where) == ("I13", "train.py:6")
    assert "an earlier run" in verdict.message


def test_an_interrupt_does_not_hide_what_came_before() -> None:
    """Ctrl-C while a failure is being cleared up ends the job by that signal, and the failure is still told."""
    verdict = _judge(_raised(0, "ValueError: boom", at=1.0), _stopped(1), interrupted=2)
    assert (verdict.stopped_by, verdict.exit_code, verdict.culprits) == ("SIGINT", 130, ())
    assert verdict.notes == ("before that: rank 0: ValueError: boom",)


def test_the_error_of_a_loader_worker_takes_the_place_of_the_one_that_passes_it_on() -> None:
    """KeyError in __getitem__: its text and its line, not those of the loop that reads the loader."""
    text = (
        "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/env/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch\n    data = self.dataset[0]\n'
        '  File "/job/data.py", line 10, in __getitem__\n    return row["label"]\nKeyError: \'label\'\n'
    )
    verdict = _judge(_raised(1, text, where="/job/train.py:32"), _stopped(0))
    assert verdict.message == "rank 1: KeyError: 'label' (in DataLoader worker 0)"
    assert verdict.where == "/job/data.py:10"


def test_an_error_of_torch_in_a_loaders_worker_is_at_the_loop_that_asked_for_the_batch() -> None:
    """Samples that can't be collated: no line of the script runs in the worker, and the message may have several lines."""
    text = (
        "RuntimeError: Caught RuntimeError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
        '  File "/env/site-packages/torch/utils/data/_utils/collate.py", line 243, in collate\n    raise RuntimeError(text)\n'
        "RuntimeError: stack expects each tensor to be equal size\ngot [3] at entry 0\n"
    )
    head = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 32, in <module>\n    for batch in loader:\n'
    )
    fault = FaultRecord(message=text, callstack=f"{head}{text}", monotonic_s=1.0, where="/job/train.py:32")
    verdict = _judge(_end(1, 1, at=1.1, fault=fault), _stopped(0))
    assert (
        verdict.message == "rank 1: RuntimeError: stack expects each tensor to be equal size (in DataLoader worker 1)"
    )
    assert verdict.where == "/job/train.py:32"


_LINK = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


def _chained(rank: int, oldest: str, newest: str, link: str, at: float) -> RankEnd:
    head = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
    fault = FaultRecord(
        message=newest, callstack=f"{head}{oldest}{link}{head}{newest}\n", monotonic_s=at, where="train.py:9"
    )
    return _end(rank, 1, at=at + 0.1, fault=fault)


def test_a_wrapped_peer_error_is_still_one() -> None:
    """`raise TrainError from error`: who only lost a peer is innocent, whatever its framework calls it."""
    verdict = _judge(
        _chained(0, _PEER, "TrainError: step failed", _LINK, at=1.0), _raised(1, "ValueError: boom", at=1.5)
    )
    assert verdict.culprits == (1,)


def test_a_barrier_in_finally_does_not_excuse_its_rank() -> None:
    """ValueError, then a timeout in `finally: barrier()`: the first of the two is the cause."""
    late = _chained(1, "ValueError: boom", "RuntimeError: Timed out waiting 4000ms for recv operation", _DURING, at=5.0)
    verdict = _judge(_raised(0, "RuntimeError: Timed out waiting 4000ms for recv operation", at=4.9), late)
    assert verdict.culprits == (1,)


def test_a_rank_that_left_early_is_found_behind_a_timeout() -> None:
    """Rank 1 ended with 0, rank 0 timed out, rank 2 waits as well: rank 1 is the cause, not one of the waiting."""
    verdict = _judge(
        _raised(0, "RuntimeError: Timed out waiting 4000ms for recv operation", at=5.0),
        _end(1, 0, at=1.0),
        _stopped(2, at=6.0, stack=_in("all_reduce")),
    )
    assert verdict.culprits == (1,)


def test_a_rank_that_ended_after_the_loss_is_not_the_one_that_was_missed() -> None:
    """Rank 1 finished long after rank 0 had lost its peer: it did not leave early."""
    assert 1 not in _judge(_raised(0, _PEER, at=1.0), _end(1, 0, at=9.0)).culprits


def test_what_we_stopped_was_not_killed_by_somebody_else() -> None:
    """A rank that raised, and got our SIGTERM while it cleared up, failed by its exception."""
    verdict = _judge(_raised(0, "ValueError: boom", at=1.0, stopped_s=1.5, code=-15), _stopped(1))
    assert (verdict.culprits, verdict.reason, verdict.class_id, verdict.exit_code) == ((0,), "", None, 1)


def test_a_watchdogs_message_is_found_before_its_frames() -> None:
    """NCCL's watchdog writes its stack behind what it says: that is not what it says."""
    words = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600 ms\n"
    words += "".join(f"frame #{number}: c10::Error\n" for number in range(20))
    verdict = _judge(_end(0, -6, at=5.0, last_words=words), _stopped(1, at=6.0))
    assert (verdict.kind, verdict.culprits) == ("hang", (1,))


@pytest.mark.parametrize("late_s", [0.1, 1.0])
def test_a_silent_end_is_found_though_it_was_reaped_late(late_s: float) -> None:
    """os._exit(0) leaves no word, and its process may be reaped after its victims have failed: they are not the cause."""
    ends = (_raised(0, _PEER, at=1.0), _end(1, 0, at=1.0 + late_s), _raised(2, _PEER, at=1.01))
    assert _judge(*ends).culprits == (1,)


def test_who_had_made_fewer_collectives_left_early() -> None:
    """The records decide between two that ended with 0: rank 1 had not reached what rank 0 was in."""
    seen = scene(
        rank_facts(0, op(), op(is_over=False), at=in_call(), world=3),
        ended(1, op(), world=3),
        ended(2, op(), op(), world=3),
    )
    ends = (_raised(0, _PEER, at=1.0), _end(1, 0, at=30.0), _end(2, 0, at=0.9))
    assert _judge(*ends, scene=seen).culprits == (1,)
    # One that said when it was through, later than the loss, was not the one that was missed.
    through = (_raised(0, _PEER, at=1.0), _end(1, 0, at=30.0, finished_s=29.0))
    assert 1 not in _judge(*through, scene=seen).culprits


def test_who_had_destroyed_its_group_is_who_was_missed() -> None:
    """A rank that goes on after destroy_process_group has left the others all the same, whether it came to its end or was stopped; on several nodes that is no proof."""
    lost = (_raised(0, _PEER, at=1.0),)
    seen = scene(ended(0, op(), op(is_over=False), code=1), ended(1, op(), op(at=9), has_left=True, ended_s=30.0))
    through = _judge(*lost, _end(1, 0, at=30.0, finished_s=29.0), scene=seen)
    assert (through.culprits, through.message.split(":")[0]) == (
        (1,),
        "rank 1 ended with exit code 0 while others were still running",
    )
    stopped = _judge(*lost, _stopped(1, at=6.0), scene=seen)
    assert stopped.culprits == (1,)
    assert stopped.message.startswith("rank 1 destroyed the process group while rank 0 still needed it")
    assert _judge(*lost, _stopped(1, at=6.0), scene=replace(seen, ranks=(seen.ranks[0],))).culprits == (0,)
    assert _judge(*lost, _stopped(1, at=6.0), scene=seen, num_nodes=2).culprits == ()


def test_a_gather_that_has_failed_is_named_while_the_rank_still_stands_in_it() -> None:
    """Torch's flight recorder says that it is over before the rank has got out of it: it is named by its module all the same, and not by how torch calls one."""
    distributed = "/env/site-packages/torch/distributed/"
    frames = (
        Frame(file=f"{distributed}distributed_c10d.py", line=4394, function="all_gather_single"),
        Frame(file=f"{distributed}fsdp/_fully_shard/_fsdp_param_group.py", line=407, function="unshard"),
        Frame(file="/env/site-packages/torch/nn/modules/module.py", line=1778, function="_wrapped_call_impl"),
        Frame(file="/job/train.py", line=9, function="forward"),
    )
    gathers = [
        op("all_gather_into_tensor", at=9, inside=("unshard", "all_gather_single"), module=f"layers.{layer}")
        for layer in (1, 2)
    ]
    seen = scene(rank_facts(0, *gathers, at=in_call()), ended(1, op(), code=-9))
    stack = Stack(frames=frames, module="layers.2")
    verdict = _judge(_stopped(0, stack=stack), _end(1, -9, at=1.0), scene=seen)
    assert [one.op for one in verdict.waiting] == ["all_gather of layers.2"]


def test_a_wait_for_a_tensor_is_named_by_the_collective_that_fills_it() -> None:
    """The line that waits is another one than that of the collective: its last record tells which."""
    frames = (
        Frame(file="/env/site-packages/torch/distributed/_functional_collectives.py", line=9, function="__torch_dispatch__"),
        Frame(file="/job/train.py", line=12, function="<module>"),
    )  # fmt: skip
    seen = scene(rank_facts(0, op(at=9), op(at=9, is_over=False), at=in_call()), ended(1, op(), code=-9))
    verdict = _judge(_stopped(0, stack=Stack(frames=frames)), _end(1, -9, at=1.0), scene=seen)
    assert [(one.rank, one.where, one.op) for one in verdict.waiting] == [(0, "/job/train.py:12", "all_reduce")]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("if bad:\n    sys.exit('no data')\n", "/job/train.py:2"),
        ("if bad:\n    raise SystemExit('no data')\n", "/job/train.py:2"),
        ("sys.exit('no data')\nsys.exit('no data')\n", None),
        ("sys.exit('no disk')\n", None),
    ],
)
def test_the_text_of_an_exit_call_tells_its_line(text: str, where: str | None) -> None:
    """sys.exit("no data") prints that: the only such call in the script is where the rank left; nothing is guessed of several."""
    seen = scene(ended(0, op(), code=1), rank_facts(1, op()), sources={"/job/train.py": text})
    verdict = _judge(_end(0, 1, last_words="epoch 3\nno data"), _stopped(1), scene=seen)
    assert (verdict.message, verdict.where) == ("rank 0: no data", where)


def test_lost_nodes_are_no_fault_of_the_script() -> None:
    """A job that ends for want of nodes exits with 75, so that its scheduler starts it again; a rank that has failed by itself comes first, with its own code."""
    lost = (LostNode(node=1, host="b", base_rank=2, num_ranks=2, why="it froze"),)
    verdict = _judge(_raised(0, _PEER), _stopped(1), world_size=4, num_nodes=2, lost_nodes=lost, min_nodes=2)
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("failure", (), 75)
    own = _judge(_raised(0, "ValueError: x", code=3), world_size=2, num_nodes=2, lost_nodes=lost, min_nodes=2)
    assert (own.culprits, own.exit_code) == ((0,), 3)
    # Those that are lost may go on without us; and a script's own 75 asks for nothing.
    assert _judge(_stopped(0), world_size=4, num_nodes=2, lost_nodes=lost, min_nodes=1).exit_code == 1
    assert _judge(_stopped(0), given_up="it froze", world_size=2, num_nodes=2, min_nodes=2).exit_code == 1
    assert _judge(_raised(0, "x", code=75)).exit_code == 1


def test_a_failure_on_another_node_is_named_here() -> None:
    """Whether our ranks have lost their peer, were terminated or are through, the cause and the exit code are those that the other node has told; what one of ours did by itself comes first."""
    told = {
        "elsewhere": "on node 1 (b): rank 2: ValueError: x",
        "elsewhere_code": 3,
        "world_size": 4,
        "num_nodes": 2,
    }
    for rank in (_raised(0, _PEER), _stopped(0), _end(0)):
        verdict = _judge(rank, _end(1), **told)
        assert (verdict.message, verdict.culprits, verdict.exit_code) == (told["elsewhere"], (), 3)
    assert _judge(_raised(0, "KeyError: 1"), **told).culprits == (0,)
