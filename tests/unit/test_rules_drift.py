"""Checksums of replicas: who differs, since when and why; and what is no drift, whatever the numbers."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.evidence.reader import scene_file
from rankwise.evidence.reader.replicas import Digest, Replica
from rankwise.verdict.case import Case, RankEnd
from rankwise.verdict.first_failure import judge
from rankwise.verdict.run_rules import look
from scenes import ended, gradient, in_call, op, rank, scene

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts
    from rankwise.verdict.finding import JobFinding

_NAMES = ("fc.weight", "fc.bias")
_OPEN = {"is_over": False}
#: By step: the weight and the bias.
_LATE = (1.9, 2.9)
_EQUAL = {0: (1.0, 2.0), 1: (1.1, 2.1), 2: (1.2, 2.2), 4: (1.3, 2.3), 5: (1.4, 2.4)}


def pack(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def pack_names(names: tuple[str, ...]) -> str:
    return pack(zlib.compress(json.dumps(names).encode(), 1))


def _digest(step: int, seq: int, values: tuple[float, ...], **facts: Any) -> Digest:
    sums = pack(struct.pack(f"<{len(values)}I", *(hash(value) & 0xFFFF for value in values)))
    return Digest(step=step, seq=seq, samples=pack(struct.pack(f"<{len(values)}f", *values)), sums=sums, **facts)


def replica(
    values: dict[int, tuple[float, ...]],
    *,
    seq_each: int = 1,
    last: tuple[float, ...] | None = (),
    order: int = 0,
    **facts: Any,
) -> Replica:
    """Return a model by the values of its two parameters at some steps, and at the end: those of the last step, unless told otherwise."""
    moment = {name: facts.pop(name) for name in ("forwarded", "synced", "rates") if name in facts}
    digests = tuple(
        _digest(step, 4 + seq_each * step, told, order=order + place, **moment)
        for place, (step, told) in enumerate(values.items())
    )
    filled = {"kind": "ddp", "members": (0, 1), "model": 0, "optimizer": 0, "form": 7, "site": "/job/train.py:5", "names": pack_names(_NAMES),
              "states": "kk", "kinds": "ff", "largest": 20, **facts}  # fmt: skip
    moments = tuple((one.step, one.seq, hash(one.sums)) for one in digests)
    if last is not None:
        told = last or list(values.values())[-1]
        digests = (*digests, _digest(digests[-1].step, 99, told, order=999, is_last=True, **moment))
    return Replica(digests=digests, moments=moments, **filled)


def hold(facts: RankFacts, *replicas: Replica) -> RankFacts:
    """Return a rank that has told of models."""
    assert facts.evidence is not None
    return replace(facts, evidence=replace(facts.evidence, replicas=replicas))


def shifted(by: float, *, places: tuple[int, ...] = (0, 1), since: int = 1) -> dict[int, tuple[float, ...]]:
    """Return values that differ from a step on."""
    return {
        step: tuple(value + by * (place in places and step >= since) for place, value in enumerate(told))
        for step, told in _EQUAL.items()
    }


def see(
    odd: dict[int, tuple[float, ...]], *ops: Op, is_over: bool = True, world: int = 2, **facts: Any
) -> list[JobFinding]:
    """Return what is seen of ranks of which the last one holds other values."""
    make = ended if is_over else rank
    members = {"members": tuple(range(world)), **({} if is_over else {"last": None}), **facts}
    odd = {step: odd[step] for step in sorted(odd)}
    ranks = [
        hold(
            make(number, *ops, world=world),
            replica({step: _EQUAL.get(step, _LATE) for step in odd} if number < world - 1 else odd, **members),
        )
        for number in range(world)
    ]
    return [finding for finding in look(scene(*ranks)) if finding.is_drift]


@pytest.mark.parametrize(
    ("class_id", "odd", "facts", "told"),
    [
        ("D26", shifted(1, since=0), {}, "all 2 parameters differ between rank 0 and rank 1 already before the first step"),
        ("D7", shifted(1), {"forwarded": False, "seq_each": 0}, "trained without its wrapper"),
        ("D7", shifted(1), {"seq_each": 0}, "trained without its wrapper"),
        ("D23", shifted(1), {"seq_each": 0, "synced": False}, "no_sync()"),
        ("D8", shifted(1, places=(1,)), {"states": "ka"}, "fc.bias (1 of 2 parameters) differs between rank 0 and rank 1 since step 1"),
        ("D9", shifted(1), {"states": "uu"}, "unfrozen later"),
        ("D10", shifted(1), {"states": "mm"}, "another device or dtype"),
        (None, shifted(1, since=4), {}, "since one of the steps 3 to 4 (in fc.weight: 1.4 on rank 0, 2.4 on rank 1); their gradients were averaged, so"),
    ],
)  # fmt: skip
def test_each_cause_has_its_class(
    class_id: str | None, odd: dict[int, tuple[float, ...]], facts: dict[str, Any], told: str
) -> None:
    """What the wrapper knows of a parameter, its flags and the collectives between two digests tell the cause; nothing is stopped for it."""
    (finding,) = see(odd, *[gradient()] * 9, **facts)
    assert (finding.class_id, finding.culprits, finding.where) == (class_id, (0, 1), "/job/train.py:5")
    assert told in finding.message
    assert (finding.kind, finding.is_proof, finding.is_stuck) == ("mismatch", True, False)


def test_the_odd_one_is_named() -> None:
    """Of four ranks three hold the same: the fourth is the one."""
    (finding,) = see(shifted(1, since=0), world=4)
    assert finding.culprits == (3,)
    assert "between rank 3 and ranks 0-2" in finding.message


def test_learning_rates_tell_the_cause() -> None:
    """Gradients are averaged, and the steps are of different lengths."""
    ranks = [hold(ended(number, *[gradient()] * 9), replica(shifted(number), rates=(0.1 / (1 + number),))) for number in (0, 1)]  # fmt: skip
    (finding,) = look(scene(*ranks))
    assert finding.class_id is None
    assert "learning rates differ: 0.1 on rank 0; 0.05 on rank 1" in finding.message


def _far(*steps: int) -> dict[int, tuple[float, ...]]:
    """Return values that differ at steps beyond the first ones."""
    return shifted(1) | dict.fromkeys(steps, (2.9, 3.9))


def _pieces(num: int, **facts: Any) -> list[Op]:
    return [op(seq=9 + place, shape=(5,), **facts) for place in range(num)]


_BYPASSED = {"forwarded": False, "seq_each": 0}
_LATER = {step: (told[0] + 1, told[1]) for step, told in _EQUAL.items() if step in {1, 2}}


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(lambda: see(_EQUAL), id="equal"),
        pytest.param(lambda: see(shifted(1), is_hooked=True), id="a hook of the user's own"),
        pytest.param(lambda: see({**_EQUAL, 5: (9.0, 9.0)}, is_over=False, states="aa"), id="once only, so far"),
        pytest.param(lambda: see(_EQUAL | _LATER, is_over=False), id="equal again later"),
        pytest.param(lambda: see(shifted(1), is_over=False, states="aa"), id="two digests, but a step apart"),
        pytest.param(lambda: see(_far(17, 80), is_over=False, **_BYPASSED), id="bypassed, and averaged every 100 steps"),
        pytest.param(lambda: see(shifted(1), last=_LATE, **_BYPASSED), id="equal at the end"),
        pytest.param(lambda: see(shifted(1), *_pieces(3), elements=30, largest=20, **_BYPASSED), id="averaged by hand in pieces"),
        pytest.param(lambda: see(shifted(1), *_pieces(1, name="all_gather"), elements=20, largest=20, **_BYPASSED), id="gathered in parts"),
        pytest.param(lambda: see(shifted(1), is_over=False, **_BYPASSED), id="bypassed, but for some steps only"),
        pytest.param(lambda: see(shifted(1), op(seq=9, shape=(20,)), **_BYPASSED), id="bypassed, and averaged by hand"),
        pytest.param(lambda: see(shifted(1), is_over=False, synced=False, seq_each=0), id="no_sync for some steps"),
        pytest.param(lambda: see(shifted(1e-5), *[gradient()] * 9), id="no more than rounding"),
        pytest.param(lambda: see({0: (1.0, 2.0)}), id="one moment that is equal"),
    ],
)  # fmt: skip
def test_what_is_no_drift(found: Any) -> None:
    """Nothing is said of what may be meant, or may be right again."""
    assert found() == []


def test_as_long_as_the_job_runs_nothing_is_proved() -> None:
    """A model that was changed is told once that has lasted, D7 and D23 after 512 steps; and then they are suspicions."""
    (finding,) = see(_far(17, 64), is_over=False, states="aa")
    assert (finding.class_id, finding.is_proof) == ("D8", False)
    assert "so far" in finding.message
    for class_id, flags in (("D7", _BYPASSED), ("D23", {"seq_each": 0, "synced": False})):
        assert not see(_far(256, 257), is_over=False, **flags)
        (finding,) = see(_far(256, 512), is_over=False, **flags)
        assert (finding.class_id, finding.is_proof) == (class_id, False)


def test_without_a_last_digest_nothing_is_proved() -> None:
    """After os._exit or an exception nobody knows what the job has come to: a note, and no exit code but the job's own."""
    (finding,) = see(shifted(1), last=None, **_BYPASSED)
    assert (finding.class_id, finding.is_proof) == ("D7", False)
    ranks = [hold(ended(number), replica(shifted(number), last=None, **_BYPASSED)) for number in (0, 1)]
    verdict = judge(_case(*ranks, strict=True))
    assert (verdict.kind, verdict.exit_code) == ("ok", 0)
    assert "have diverged" in verdict.notes[0]
    assert not any("not one model" in note for note in verdict.notes)


def test_few_pieces_are_no_averaging() -> None:
    """A metric now and then is not half of a model, whole numbers are none of it, and what was sent before another digest does not add up."""
    for ops in (_pieces(2), _pieces(9, dtypes=("int64",))):
        assert see(shifted(1), *ops, elements=30, largest=20, **_BYPASSED)
    # Numbers 5, 6 and 8 are sent before the digests of steps 1, 2 and 4.
    apart = [op(seq=seq, shape=(5,)) for seq in (5, 6, 8)]
    assert see(shifted(1), *apart, elements=30, largest=20, forwarded=False)


@pytest.mark.parametrize("ends", [False, True])
def test_what_another_optimizer_finds_equal_was_undone(*, ends: bool) -> None:
    """Each rank adapts a copy to its own data and restores it: the optimizer that trains the model, or the next such one, finds it equal."""
    make = ended if ends else rank
    inner = {"last": None, **_BYPASSED}

    def look_at(others: dict[int, tuple[float, ...]], **facts: Any) -> tuple[JobFinding, ...]:
        return look(scene(*(
            hold(make(number), replica(_far(64) if number else dict.fromkeys(_far(64), _LATE), states="aa", **inner),
                 replica(others, optimizer=1, last=None, **facts)) for number in (0, 1)
        )))  # fmt: skip

    assert look_at({0: (1.0, 2.0)})
    assert not look_at({0: (1.0, 2.0)}, order=50)
    assert not look_at({0: (1.0, 2.0), 17: (1.5, 2.5)})
    assert look_at({0: (1.0,), 17: (1.5,)}, names=pack_names(("other",)), states="k", kinds="f")


def test_what_was_told_meanwhile_and_no_longer_holds_is_dropped() -> None:
    """A job whose replicas are equal at its end is a success, whatever was said of them before."""
    (earlier,) = see(shifted(1), **_BYPASSED)
    equal = [hold(ended(number), replica(shifted(number), last=_LATE, **_BYPASSED)) for number in (0, 1)]
    verdict = judge(_case(*equal, findings=(earlier,), strict=True))
    assert (verdict.kind, verdict.exit_code, verdict.notes) == ("ok", 0, ())
    apart = [hold(ended(number), replica(shifted(number), **_BYPASSED)) for number in (0, 1)]
    verdict = judge(_case(*apart, findings=(earlier,), strict=True))
    assert (verdict.kind, verdict.exit_code) == ("mismatch", 1)
    assert any("not one model" in note for note in verdict.notes)


def test_ranks_at_other_places_of_their_program_are_not_compared() -> None:
    """After uneven inputs the ranks' third steps are not the same moment: their group had made other numbers of collectives."""
    ahead = replace(replica(shifted(1, since=0)), digests=tuple(replace(one, seq=one.seq + 3) for one in replica(shifted(1)).digests),
                    moments=tuple((step, seq + 3, total) for step, seq, total in replica(shifted(1)).moments))  # fmt: skip
    assert not look(scene(hold(ended(0), replica(_EQUAL)), hold(ended(1), ahead)))


def test_other_machines_round_otherwise() -> None:
    """A small difference between two kinds of processors is none; a large one is."""
    for by, is_told in ((1e-4, False), (1.0, True)):
        ranks = [hold(ended(0), replica(_EQUAL, machine="a")), hold(ended(1), replica(shifted(by, since=0), machine="b"))]  # fmt: skip
        assert bool(look(scene(*ranks))) == is_told


def _plain(number: int, *ops: Op, is_over: bool = True, **facts: Any) -> RankFacts:
    values = shifted(number, since=1)
    make = ended if is_over else rank
    return hold(make(number, *ops), replica(values, kind="plain", seq_each=0, site="", states="", **facts))


def test_a_model_that_nobody_wrapped_is_told_at_the_end() -> None:
    """D7 once the job is over; not while it runs, nor if something as large as a parameter was sent, nor if the ranks began apart."""
    (finding,) = look(scene(_plain(0), _plain(1)))
    assert (finding.rule, finding.class_id, finding.is_proof) == ("never_wrapped", "D7", False)
    assert "unless intended" in finding.message
    assert "RANKWISE_DIGESTS=0" in finding.fix
    verdict = judge(_case(_plain(0), _plain(1), strict=True))
    assert (verdict.kind, verdict.exit_code) == ("ok", 0)
    assert finding.message in verdict.notes[0]
    assert not look(scene(_plain(0, is_over=False), _plain(1, is_over=False)))
    assert not look(scene(*(_plain(number, *[op()] * 5, op(shape=(20,))) for number in (0, 1))))
    assert not look(scene(*(_plain(number, rates=(float(number),)) for number in (0, 1))))
    apart = [hold(ended(number), replica(shifted(number, since=0), kind="plain")) for number in (0, 1)]
    assert not look(scene(*apart))


def _case(*ranks: RankFacts, **facts: Any) -> Case:
    ends = tuple(
        RankEnd(rank=one.rank, local_rank=one.rank, pid=one.pid, code=one.code, ended_s=one.ended_s or 1000.0)
        for one in ranks
    )
    return Case(ranks=ends, world_size=len(ranks), scene=scene(*ranks), **facts)


def test_a_drift_explains_no_hang() -> None:
    """Who waits for whom is the verdict on a job that hangs, and the drift stands beside it."""
    loaded = shifted(1, since=0)
    waits = hold(rank(0, op("barrier", **_OPEN), at=in_call("barrier")), replica(_EQUAL))
    (first, *_) = look(scene(waits, hold(ended(1), replica(loaded))))
    assert not first.is_drift
    verdict = judge(_case(waits, hold(ended(1), replica(loaded)), hung=True))
    assert verdict.kind == "hang"
    assert "drifted" not in verdict.message


def test_a_drift_explains_no_failure() -> None:
    """A rank that fails by itself is the cause, whatever its replicas hold."""
    loaded = shifted(1, since=0)
    verdict = judge(_case(hold(ended(0), replica(_EQUAL)), hold(ended(1, code=3), replica(loaded))))
    assert (verdict.kind, verdict.culprits, verdict.exit_code) == ("failure", (1,), 3)
    assert any("have diverged" in note for note in verdict.notes)


def test_a_scene_keeps_its_replicas() -> None:
    """The evidence folder holds what the rule needs."""
    before = scene(hold(ended(0), replica(_EQUAL)), hold(ended(1), replica(shifted(1, since=0))))
    assert scene_file.from_json(scene_file.to_json(before)) == before
