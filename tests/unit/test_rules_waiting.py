"""Ranks that wait for others: who keeps them waiting is named, and what it does; what is proved is told from what may end well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts, Scene
from rankwise.verdict.run_rules import look
from scenes import (
    NOW_S,
    buffers,
    elsewhere,
    ended,
    gradient,
    in_backward,
    in_call,
    in_forward,
    in_loader,
    in_wrapping,
    op,
    rank,
    scene,
    stack,
    workers,
)  # fmt: skip

_OPEN = {"is_over": False}
_TORCH = "/env/lib/python3.11/site-packages/torch"
_RENDEZVOUS = f"{_TORCH}/distributed/rendezvous.py"
_RECORDER = "/env/lib/python3.11/site-packages/rankwise/evidence/in_rank/intercept_calls.py"


def _first(*ranks: RankFacts, **facts: Any) -> Any:
    return look(scene(*ranks, **facts))[0]


def _waiting(number: int, *earlier: Op, world: int = 2, **facts: Any) -> RankFacts:
    """Return a rank that waits in an all_reduce of line 7."""
    return rank(number, *earlier, op(**_OPEN), at=in_call(), world=world, **facts)


def test_a_slow_rank_is_told_without_blame() -> None:
    """It is busy: who it is, where and how busy; no class, and never a proof."""
    finding = _first(
        *(_waiting(number, op(), world=4) for number in range(3)),
        rank(3, op(), at=elsewhere(88), world=4, is_asleep=False),
    )
    assert (finding.certainty, finding.rule, finding.culprits, finding.class_id, finding.doing) == (
        "suspicion",
        "kept_waiting",
        (3,),
        None,
        "busy",
    )
    assert finding.message == (
        "rank 3 is busy (98 % CPU) at train.py:88; ranks 0-2 wait in all_reduce #2 ([4] float32) from train.py:7"
    )
    first = finding.waiting[0]
    assert (first.rank, first.op, first.where) == (0, "all_reduce", "/job/train.py:7")


def test_the_fast_one_is_not_blamed_for_the_slow_many() -> None:
    """One rank that waits for seven that work is no deviation."""
    finding = _first(
        _waiting(0, world=8),
        *(rank(number, at=elsewhere(), world=8, is_asleep=False) for number in range(1, 8)),
    )
    assert finding.culprits == tuple(range(1, 8))


@pytest.mark.parametrize(
    ("frames", "doing"),
    [
        ((f"{_TORCH}/_dynamo/convert_frame.py", "compile_inner"), "compiling"),
        ((f"{_TORCH}/_inductor/codecache.py", "load"), "compiling"),
        ((f"{_TORCH}/serialization.py", "save"), "saving"),
        ((f"{_TORCH}/utils/data/dataloader.py", "__next__"), "loading data"),
    ],
)
def test_what_the_missed_rank_does_is_told(frames: tuple[str, str], doing: str) -> None:
    """A rank in torch's compiler, its checkpoints or its loader is none that is stuck."""
    busy = stack((frames[0], 1, frames[1]), at=30)
    finding = _first(_waiting(0), rank(1, at=busy))
    assert (finding.doing, finding.certainty, finding.class_id) == (doing, "suspicion", None)


def test_a_debugger_is_never_a_hang() -> None:
    """Somebody is typing."""
    finding = _first(_waiting(0), rank(1, at=elsewhere(), reads_terminal=True))
    assert (finding.doing, finding.certainty, finding.is_stuck) == ("debugged", "suspicion", False)
    assert "debugger" in finding.message


@pytest.mark.parametrize(("world", "code"), [(2, 0), (4, 0), (4, 3), (4, -9)])
def test_a_member_that_has_ended_is_a_proof(world: int, code: int) -> None:
    """R6: whatever its exit code was, it does not come any more."""
    finding = _first(
        *(_waiting(number, op(), world=world) for number in range(world - 1)),
        ended(world - 1, op(), world=world, code=code),
    )
    assert (finding.certainty, finding.rule, finding.culprits, finding.is_stuck) == (
        "proof",
        "member_ended",
        (world - 1,),
        True,
    )
    assert finding.class_id == ("R6" if code == 0 else None)
    assert f"{'exit code' if code >= 0 else 'signal'} {abs(code)}" in finding.message


def test_a_rank_that_ended_after_its_part_is_not_missed() -> None:
    """It had entered the collective before it ended: the others are about to come out."""
    assert not look(scene(_waiting(0), ended(1, op())))


def test_gradients_that_a_dead_rank_may_have_sent_prove_nothing_at_once() -> None:
    """C++ issued them, and the flight recorder was not read at the end: only silence for seconds tells."""
    waiting = rank(0, gradient(), gradient(**_OPEN), at=in_backward())
    late = ended(1, gradient(), ended_s=NOW_S - 1, dumped_s=NOW_S - 60)
    assert not [finding for finding in look(scene(waiting, late)) if finding.is_proof]
    old = ended(1, gradient(), ended_s=NOW_S - 8, dumped_s=NOW_S - 60)
    assert _first(waiting, old).is_proof


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_rank_that_left_the_loop_is_named(world: int, is_recorded: bool) -> None:
    """D14: the others wait in backward for one that trained along and sleeps; also where C++'s collectives are not recorded."""
    past = (gradient(), gradient(**_OPEN)) if is_recorded else ()
    ranks = [rank(number, *past, at=in_backward(), world=world, steps=3) for number in range(world - 1)]
    finding = _first(*ranks, rank(world - 1, *past[:1], at=elsewhere(12), world=world, steps=3))
    assert (finding.rule, finding.class_id, finding.culprits, finding.where) == (
        "fewer_steps",
        "D14",
        (world - 1,),
        "/job/train.py:12",
    )


def test_a_backward_pass_that_computes_is_no_wait() -> None:
    """Its stack looks the same; its processor does not."""
    busy = rank(0, gradient(), gradient(**_OPEN), at=in_backward(), is_asleep=False)
    assert not look(scene(busy, rank(1, gradient(), at=elsewhere())))


def test_a_forward_pass_for_an_evaluation_of_one_rank_is_named() -> None:
    """D17: rank 0 broadcasts buffers from a line that the others never were at."""
    finding = _first(
        rank(0, buffers(6), buffers(11, **_OPEN), at=in_forward(11)), rank(1, buffers(6), at=elsewhere(20))
    )
    assert (finding.rule, finding.class_id) == ("forward_on_some", "D17")


def test_a_wrapper_on_some_ranks_is_named() -> None:
    """D13: the other rank sleeps and never wrapped."""
    wrapping = op(
        "all_gather",
        at=5,
        source="native",
        inside=("__init__", "_verify_param_shape_across_processes"),
        **_OPEN,
    )
    finding = _first(rank(0, wrapping, at=in_wrapping()), rank(1, at=elsewhere()))
    assert (finding.rule, finding.class_id) == ("wrapped_on_some", "D13")


def test_a_state_dict_on_one_rank_is_named() -> None:
    """D28: gathering the state of a sharded model takes all ranks."""
    gathering = stack(
        (f"{_TORCH}/_ops.py", 1, "redispatch"),
        (f"{_TORCH}/distributed/_functional_collectives.py", 2, "wait_tensor"),
        (f"{_TORCH}/distributed/tensor/_api.py", 3, "full_tensor"),
        at=10,
    )
    finding = _first(
        rank(0, op("all_gather_into_tensor", at=10, source="native", **_OPEN), at=gathering),
        rank(1, at=elsewhere(11)),
    )
    assert (finding.rule, finding.class_id, finding.where) == ("state_on_some", "D28", "/job/train.py:11")


def test_a_barrier_without_counterpart_is_named() -> None:
    """C2: rank 0 was at this very line one barrier earlier."""
    finding = _first(
        rank(0, op("barrier", at=8), at=elsewhere(9)),
        rank(1, op("barrier", at=6), op("barrier", at=8, **_OPEN), at=in_call("barrier", 8)),
    )
    assert (finding.rule, finding.class_id, finding.culprits) == ("split_barrier", "C2", (0,))


@pytest.mark.parametrize(("first", "second"), [("send", "send"), ("recv", "recv"), ("isend", "isend")])
def test_messages_in_a_circle_are_a_proof(first: str, second: str) -> None:
    """C9: both send first, or both receive first."""
    finding = _first(
        rank(0, op(first, peer=1, **_OPEN), at=in_call(first)),
        rank(1, op(second, peer=0, **_OPEN), at=in_call(second)),
    )
    assert (finding.rule, finding.class_id, finding.certainty, finding.culprits) == (
        "wait_cycle",
        "C9",
        "proof",
        (0, 1),
    )


_SENDS = "import torch.distributed as dist, comm" + "\n" * 9 + "{}\nr = dist.irecv(b, 1)\nr.wait()\n\n\n{}\n"


def _exchange(
    line: str,
    *,
    receives: str = "dist.recv(a, 0)",
    waits_in: str = "irecv",
    backend: str = "gloo",
    **sent: Any,
) -> Scene:
    """Return ranks of which the first one sends by ``line``, and waits for an answer; the second one waits for what was sent."""
    early = {"entered_s": NOW_S - 9, **_OPEN}
    return scene(
        rank(0, op("isend", peer=1, at=10, **{**_OPEN, **sent}), op(waits_in, peer=1, at=11, **early), at=stack((_RECORDER, 5, "wait"), at=12), still_s=0.0, backend=backend),
        rank(1, op("recv", peer=0, at=15, **early), at=in_call("recv", 15), backend=backend),
        sources={"/job/train.py": _SENDS.format(line, receives)},
    )  # fmt: skip


def test_a_message_that_went_with_its_handle_is_told() -> None:
    """C12: the isend is issued and its handle discarded; its rank waits for an answer to it, and Gloo's thread is busy with the rest."""
    (finding,) = look(_exchange("dist.isend(a, 1)"))
    assert (finding.rule, finding.class_id, finding.certainty, finding.culprits, finding.where) == (
        "wait_cycle",
        "C12",
        "suspicion",
        (0,),
        "/job/train.py:10",
    )
    assert "isend returns at train.py:10" in finding.fix


@pytest.mark.parametrize(
    "legal",
    [
        _exchange("s = dist.isend(a, 1)"),
        _exchange("works = dist.batch_isend_irecv(ops)"),
        _exchange("dist.isend(a, 1).wait()"),
        _exchange("dist.isend(a, 1)", waits_in="send"),
        _exchange("dist.isend(a, 1)", backend="nccl"),
        _exchange("dist.isend(a, 1)", is_over=None),
        _exchange("dist.isend(a, 1, tag=1)", receives="dist.recv(a, 0, tag=2)"),
        _exchange("dist.isend(a, 1)", receives="dist.recv(a, 0, tag=2)"),
        _exchange("comm.isend(a, 1)"),
    ],
)
def test_a_message_whose_handle_is_kept_is_only_slow(legal: Scene) -> None:
    """Which of its handles a rank waits for is not known, nor what another library's isend keeps, nor whether tags correspond; and NCCL sends what was issued, whoever holds the handle."""
    assert all(one.class_id != "C12" for one in look(legal))


def test_a_ring_of_sends_is_a_circle_of_all() -> None:
    """Each rank sends to the next one before it receives."""
    ranks = [
        rank(number, op("send", peer=(number + 1) % 5, **_OPEN), at=in_call("send"), world=5) for number in range(5)
    ]
    assert _first(*ranks).culprits == (0, 1, 2, 3, 4)


def test_two_groups_in_different_order_are_a_circle() -> None:
    """Rank 0 is in the group of all, rank 1 in that of the pair, and each waits for the other."""
    pair = (Group(name="1", ranks=(0, 1), backend="gloo"),)
    finding = _first(
        rank(0, op(at=5, **_OPEN), at=in_call(at=5), groups=pair, world=3),
        rank(1, op(at=6, group="1", **_OPEN), at=in_call(at=6), groups=pair, world=3),
        rank(2, op(at=5, **_OPEN), at=in_call(at=5), world=3),
    )
    assert (finding.rule, finding.certainty, finding.culprits) == ("wait_cycle", "proof", (0, 1))
    assert [one.rank for one in finding.waiting] == [0, 1, 2]


def test_a_stopped_process_is_told_and_can_go_on() -> None:
    """SIGSTOP: it is sure that it does not move, and SIGCONT makes it move again."""
    finding = _first(_waiting(0), rank(1, state="stopped"))
    assert (finding.rule, finding.certainty, finding.is_stuck, finding.doing) == (
        "stopped_process",
        "proof",
        False,
        "stopped",
    )
    assert "kill -CONT 4001" in finding.fix


@pytest.mark.parametrize(
    ("states", "class_id", "is_stuck"), [("ZZ", "R3", True), ("TT", None, False), ("TZ", None, False)]
)
def test_dead_workers_are_named_with_their_rank(states: str, class_id: str | None, is_stuck: bool) -> None:
    """R3: no batch can come; the ranks that wait for this rank are told too, and it is said once."""
    findings = look(scene(_waiting(0), rank(1, at=in_loader(), children=workers(*states))))
    assert [(finding.rule, finding.class_id, finding.is_stuck, finding.culprits) for finding in findings] == [
        ("dead_worker", class_id, is_stuck, (1,))
    ]
    assert [one.rank for one in findings[0].waiting] == [0]


def test_a_living_worker_is_only_slow() -> None:
    """One worker has come to its end, and another one still reads."""
    finding = _first(_waiting(0), rank(1, at=in_loader(), children=workers("Z", "S")))
    assert (finding.rule, finding.doing, finding.certainty) == ("kept_waiting", "loading data", "suspicion")


def test_the_line_of_a_worker_that_is_waited_for_is_told() -> None:
    """Where a worker stands is the cause, and more workers would be no remedy; those that have nothing to do are not told."""
    stuck, idle = workers("S", "S")
    children = (
        replace(stuck, stack=Stack(frames=(Frame(file="/home/u/data.py", line=12, function="__getitem__"),))),
        idle,
    )
    finding = _first(_waiting(0), rank(1, at=in_loader(), children=children))
    assert "whose worker is at data.py:12" in finding.message
    assert "data.py:12" in finding.fix
    assert "more loader workers" not in finding.fix


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_that_never_came_to_init_is_named(has_ended: bool) -> None:
    """I1: the others stand in init_process_group."""
    meeting = in_call("init_process_group", 3)
    away = ended(2, has_joined=False) if has_ended else rank(2, at=elsewhere(2), has_joined=False)
    finding = _first(*(rank(number, at=meeting, has_joined=False, world=3) for number in range(2)), away)
    assert (finding.rule, finding.class_id, finding.culprits) == ("absent_from_rendezvous", "I1", (2,))
    assert finding.certainty == ("proof" if has_ended else "suspicion")


def test_a_store_that_nobody_serves_is_told() -> None:
    """I2: below a launcher no rank serves the store that a script's own address names, and torch looks for it for half an hour. Elsewhere rank 0 serves it, in the same call, and during a start it may just not be there yet."""
    at = stack((_RENDEZVOUS, 171, "_create_c10d_store"), at=3)
    seeking = [rank(number, at=at, has_joined=False) for number in range(2)]
    (finding,) = look(scene(*seeking, has_agent_store=True))
    assert (finding.class_id, finding.culprits, finding.certainty) == ("I2", (0, 1), "suspicion")
    assert "for the store in init_process_group at train.py:3" in finding.message
    soon = rank(1, at=at, has_joined=False, still_s=0.0)
    imports = rank(2, at=elsewhere(1), has_joined=False)
    for legal in (scene(*seeking), scene(seeking[0], soon, has_agent_store=True), scene(*seeking, imports, has_agent_store=True)):  # fmt: skip
        assert all(one.class_id != "I2" for one in look(legal))


def test_a_rank_that_still_imports_is_slow() -> None:
    """Others are in init already; no process claims to blame yet."""
    finding = _first(
        rank(0, at=in_call("init_process_group"), has_joined=False),
        rank(1, at=elsewhere(1), has_joined=False, is_asleep=False),
    )
    assert (finding.class_id, finding.certainty, finding.doing) == (None, "suspicion", "busy")


def test_a_group_that_members_alone_make_is_named() -> None:
    """C10: ranks wait in new_group, and the others wait for them in a collective."""
    finding = _first(rank(0, at=in_call("new_group", 5)), rank(1, op(at=9, **_OPEN), at=in_call(at=9)))
    assert (finding.rule, finding.class_id, finding.certainty) == ("absent_from_rendezvous", "C10", "proof")


def test_a_monitored_barrier_is_waited_in_too() -> None:
    """It is made of messages, and its number is not comparable: the stacks tell."""
    ranks = [
        rank(number, op("monitored_barrier", **_OPEN), at=in_call("monitored_barrier"), world=4) for number in (0, 1, 3)
    ]
    finding = _first(*ranks[:2], rank(2, at=elsewhere(), world=4), ranks[2])
    assert (finding.culprits, finding.certainty) == ((2,), "suspicion")


_SCRIPT = """import torch.distributed as dist
r, w = dist.get_rank(), dist.get_world_size()
def mean(x):
    dist.all_reduce(x)
    return x / w
try:
    if r == 0: print(mean(x))
    ok = is_good(x) and mean(x)
    if loss > 1: mean(x)
    if r == 0 and mean(x): stop()
except ValueError:
    time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("called_at", "asleep_at", "class_id"),
    [(7, 13, "C1"), (10, 13, "C1"), (9, 13, "C26"), (8, 13, "C26"), (7, 12, "R1")],
)
def test_the_scripts_own_lines_decide_the_class(called_at: int, asleep_at: int, class_id: str) -> None:
    """C1: a rank test, also around a helper or before `and`. C26: another condition. R1: the missed rank is in an except."""
    inner = in_call(at=4)
    calling = Stack(frames=(*inner.frames, *elsewhere(called_at).frames))
    ranks = (rank(0, op(at=4, **_OPEN), at=calling), rank(1, at=elsewhere(asleep_at)))
    finding = _first(*ranks, sources={"/job/train.py": _SCRIPT})
    assert finding.class_id == class_id
    assert _first(*ranks).class_id is None


def test_what_can_not_be_seen_is_not_accused() -> None:
    """Rank 2 lives on another node: who waits for it is told nothing of it."""
    ranks = [_waiting(number, world=3) for number in range(2)]
    assert not look(scene(*ranks, is_whole=False, world_size=3))


def test_who_waits_for_one_that_waits_is_not_told_apart() -> None:
    """Ranks 0 and 1 wait for rank 2, which waits for rank 3: rank 3 is the one."""
    pair = (Group(name="1", ranks=(2, 3), backend="gloo"),)
    findings = look(
        scene(
            _waiting(0, world=4),
            _waiting(1, world=4),
            rank(2, op(at=5, group="1", **_OPEN), at=in_call(at=5), groups=pair, world=4),
            rank(3, at=elsewhere(30), groups=pair, world=4),
        )
    )
    assert [finding.culprits for finding in findings] == [(3,)]
    assert [one.rank for one in findings[0].waiting] == [0, 1, 2]


def test_the_key_stays_while_the_wait_lasts() -> None:
    """The same finding a minute later is the same one, whatever the rank does by then."""
    early = _first(_waiting(0, op()), rank(1, op(), at=elsewhere(9), is_asleep=False))
    late = _first(_waiting(0, op()), rank(1, op(), at=elsewhere(33)))
    other = _first(_waiting(0, op(), op()), rank(1, op(), op(), at=elsewhere(9)))
    assert early.key == late.key != other.key


def test_groups_with_equal_ends_are_not_mixed_up() -> None:
    """Ranks 0-5 and ranks 0, 1, 3, 4, 5 are two groups: who is missed in one of them is not looked for in the other."""
    five = (Group(name="1", ranks=(0, 1, 3, 4, 5), backend="gloo"),)
    late = rank(2, at=elsewhere(30), world=6)
    ranks = [rank(number, op(group="1"), op(**_OPEN), at=in_call(), groups=five, world=6) for number in (0, 1, 3, 4)]
    other = rank(5, op(group="1", **_OPEN), at=in_call(), groups=five, world=6)
    findings = look(scene(*ranks[:2], late, *ranks[2:], other))
    assert [finding.culprits for finding in findings] == [(2,)]


@pytest.mark.parametrize(("earlier", "is_proof"), [([], False), ([op("recv", peer=0)], True)])
def test_messages_of_long_ago_prove_nothing(earlier: list[Op], is_proof: bool) -> None:
    """A ring that has forgotten its beginning may have held the answer; one that still shows an older answer has not."""
    past = [op("barrier", at=3) for _ in range(300)]
    mine = [op("recv", peer=1) for _ in earlier]
    first = rank(0, *past, *mine, op("send", peer=1, seq=2, **_OPEN), at=in_call("send"))
    second = rank(1, *past, *earlier, op("send", peer=0, seq=2, **_OPEN), at=in_call("send"))
    assert bool([finding for finding in look(scene(first, second)) if finding.rule == "wait_cycle"]) == is_proof


def test_the_one_with_a_batch_more_is_named_not_the_many_that_are_done() -> None:
    """Seven ranks have left the loop, and the eighth is in one backward pass more."""
    done = [rank(number, gradient(), at=elsewhere(12), world=8) for number in range(7)]
    finding = _first(*done, rank(7, gradient(), gradient(**_OPEN), at=in_backward(), world=8))
    assert (finding.rule, finding.culprits, finding.where) == ("fewer_steps", (7,), "/job/train.py:7")


def test_a_server_that_waits_for_its_clients_waits_in_no_collective() -> None:
    """RPC: rank 0 waits in shutdown until the others are through, for hours if need be."""
    serving = stack((f"{_TORCH}/distributed/rpc/api.py", 300, "_wait_all_workers"), at=20)
    assert not look(scene(rank(0, at=serving), rank(1, at=elsewhere(), is_asleep=False)))


@pytest.mark.parametrize("file", ["cuda/__init__.py", "optim/adamw.py", "nn/utils/clip_grad.py"])
def test_on_a_gpu_the_wait_is_at_the_next_line_that_needs_a_result(file: str) -> None:
    """NCCL's collectives return at once: a rank that stands in torch.cuda.synchronize waits for the one that is open."""
    at = stack((f"{_TORCH}/{file}", 1083, "synchronize"), at=9)
    seen = _first(rank(0, op(), op(**_OPEN), at=at, backend="nccl"), rank(1, op(), at=elsewhere(12), backend="nccl"))
    assert seen.culprits == (1,)
    assert "train.py:12" in seen.message


@pytest.mark.parametrize("is_over", [False, None, True])
def test_a_process_stopped_inside_a_collective_is_told(is_over: bool | None) -> None:
    """It has entered, and never comes out; one that was through with it keeps nobody waiting."""
    stopped = rank(2, op(), op(is_over=is_over), state="stopped", world=3)
    findings = look(scene(*(_waiting(number, op(), world=3) for number in range(2)), stopped))
    assert [(one.rule, one.culprits, one.is_stuck) for one in findings] == (
        [] if is_over else [("stopped_process", (2,), False)]
    )


def test_a_stopped_worker_keeps_the_batches_of_the_others() -> None:
    """The other worker is idle, not slow; while one reads or computes it is not known which of them is missed."""
    findings = look(scene(_waiting(0), rank(1, at=in_loader(), children=workers("S", "T"))))
    assert [(one.rule, one.culprits, one.is_stuck) for one in findings] == [("dead_worker", (1,), False)]
    assert "1 of its data-loading workers is stopped by a signal (SIGSTOP): PID 9001" in findings[0].message
    for state in "RD":
        busy = rank(1, at=in_loader(), children=workers(state, "T"))
        assert _first(_waiting(0), busy).rule == "kept_waiting"


_RECORDER = "/env/lib/python3.11/site-packages/rankwise/evidence/in_rank/intercept_calls.py"


def test_waiting_for_a_work_is_a_wait() -> None:
    """`work.wait()` in the user's own line is C++'s: isend for a rank that is in a barrier can't end."""
    finding = _first(
        rank(0, op("isend", peer=1, at=7, **_OPEN), at=stack((_RECORDER, 140, "wait"))),
        rank(1, op("barrier", at=9, **_OPEN), at=in_call("barrier", 9)),
    )
    assert (finding.rule, finding.certainty, finding.culprits) == ("wait_cycle", "proof", (0, 1))
    assert "rank 0 sends to rank 1 at train.py:7, and rank 1 waits in barrier #1 at train.py:9" in finding.message
    assert finding.fix.startswith("let rank 1 make the recv that answers train.py:7")


def test_typing_behind_a_work_is_none() -> None:
    """Whoever waits for the keyboard waits for no rank."""
    at = stack((_RECORDER, 140, "wait"))
    typing = rank(0, op(**_OPEN), at=at, reads_terminal=True)
    assert not [one for one in look(scene(typing, _waiting(1))) if one.is_proof]


def _astray(*before: Op) -> tuple[RankFacts, ...]:
    return (
        rank(0, op("send", peer=2, at=5, **_OPEN), at=in_call("send", 5), world=3),
        rank(1, op("barrier", at=9, **_OPEN), at=in_call("barrier", 9), world=3),
        rank(2, *before, op("recv", peer=1, at=6, **_OPEN), at=in_call("recv", 6), world=3),
    )


def test_a_message_to_another_rank_than_expects_one_is_told_as_such() -> None:
    """Rank 0 sends to 2, which receives from 1: these two are told, and rank 1 only waits for them."""
    finding = _first(*_astray())
    assert (finding.rule, finding.class_id, finding.culprits) == ("wait_cycle", "C9", (0, 2))
    assert (
        "rank 0 sends to rank 2 at train.py:5, and rank 2 expects a message from rank 1 at train.py:6"
        in finding.message
    )
    assert "dst=2 at train.py:5 needs src=0 at train.py:6" in finding.fix
    assert [one.rank for one in finding.waiting] == [1]


def test_who_may_have_left_its_message_out_is_not_acquitted() -> None:
    """Rank 1 has sent to rank 2 before, and is in a barrier now: it may be the one that went on too early."""
    finding = _first(*_astray(op("recv", peer=1, at=6)))
    assert (finding.class_id, finding.culprits) == (None, (0, 1, 2))


def test_of_two_the_one_that_a_rank_test_led_away_is_named() -> None:
    """Rank 1 sleeps under `if rank == 1`, and rank 0 waits at a line of all; without the text both are named."""
    ranks = (_waiting(0), rank(1, at=elsewhere(3)))
    text = "rank = dist.get_rank()\nif rank == 1:\n    time.sleep(99)\n\n\n\ndist.all_reduce(x)\n"
    assert _first(*ranks, sources={"/job/train.py": text}).culprits == (1,)
    assert _first(*ranks).culprits == (0, 1)


def _joins(*children: Child, **facts: Any) -> RankFacts:
    at = stack(("/lib/python3.11/multiprocessing/popen_fork.py", 27, "poll"), at=30)
    return rank(0, at=at, children=children, has_joined=False, **facts)


@pytest.mark.parametrize(
    ("still_s", "name", "is_told"), [(9.0, "python", True), (0.2, "python", False), (9.0, "ssh", False)]
)
def test_a_wait_for_own_processes_is_a_hang_only_if_these_do_nothing(still_s: float, name: str, is_told: bool) -> None:
    """A child that uses the CPU may be what its rank waits for, and what a program waits for that is no Python nobody knows."""
    child = Child(pid=77, name=name, state="S", still_s=still_s)
    findings = look(scene(_joins(child)))
    assert [one.rule for one in findings] == ["local_wait"] * is_told
    assert all("process 77 is idle" in one.message and "py-spy" in one.fix for one in findings)


def test_a_rank_at_work_keeps_the_others_own_waits_from_being_a_hang() -> None:
    """One rank joins an idle child, another one computes: nothing is said."""
    child = Child(pid=77, name="python", state="S", still_s=9.0)
    assert look(scene(_joins(child), rank(1, at=elsewhere(), is_asleep=False))) == ()


@pytest.mark.parametrize("others", [(), ("producer",)])
def test_a_rank_of_which_nothing_else_is_left_can_be_woken_by_nobody(others: tuple[str, ...]) -> None:
    """The thread that was to fill its queue is gone: that is told, and not where a thread is left."""
    at = stack(("/lib/python3.11/queue.py", 171, "get"), at=30)
    threads = {"MainThread": at, **dict.fromkeys(others, elsewhere(5))}
    alone = rank(0, at=at, has_joined=False)
    evidence = replace(alone.evidence or Evidence(), stacks=threads)
    (finding,) = look(scene(replace(alone, evidence=evidence)))
    assert (finding.rule, "has no other thread and no process" in finding.message) == ("local_wait", not others)
    assert ("look for its error" in finding.fix) == (not others)


def test_processes_that_do_the_same_are_counted() -> None:
    """Four idle ones, as the workers of a loader, are one clause; the one that is dead has its own."""
    children = [Child(pid=70 + number, name="python", state="S", still_s=9.0) for number in range(4)]
    message = look(scene(_joins(*children, Child(pid=80, name="python", state="Z"))))[0].message
    assert "(process 70, process 71, 2 more are idle; process 80 is dead)" in message
