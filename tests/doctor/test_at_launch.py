"""What a launcher asks the doctor: only what is surely wrong before a start, and what fits the failure after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fake_hosts import make_host
from rankwise.doctor import at_launch
from rankwise.doctor.at_launch import find_host_problems, format_readings, look_after, look_before
from rankwise.doctor.host import JobShape
from rankwise.doctor.probe import Reading

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from rankwise.doctor.host import Host


def _make(root: Path, **facts: object) -> Host:
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    (root / "tmp").mkdir(exist_ok=True)
    return make_host(root, **facts)  # type: ignore[arg-type]


def test_a_sound_host_has_nothing_said(tmp_path: Path) -> None:
    """Before and after, with classes of all kinds."""
    host = _make(tmp_path, job=JobShape(num_ranks=2, is_launch=True))
    assert look_before(host) == []
    assert find_host_problems(host) == []
    assert [look_after(host, class_id=one) for one in (None, "C1", "X16", "R3")] == [[]] * 4


def test_what_surely_breaks_is_said_before(tmp_path: Path) -> None:
    """An interface for Gloo that this host does not have; a variable left over from debugging is for `rankwise doctor` to tell."""
    host = _make(tmp_path, env={"GLOO_SOCKET_IFNAME": "eht0", "CUDA_LAUNCH_BLOCKING": "1"})
    (one,) = look_before(host)
    assert (one.probe, one.class_id) == ("gloo-variables", "I6")
    assert format_readings([one]) == (f"{one.what} -> {one.fix.splitlines()[0]}",)


def test_what_is_doubtful_is_said_if_it_leads_to_the_failure(tmp_path: Path) -> None:
    """A small /dev/shm beside a worker killed for it, not beside a wrong collective; and not what the verdict says itself."""
    host = _make(tmp_path)
    small = (512 << 20, 500 << 20)
    host.usage = lambda _path: small  # type: ignore[method-assign]
    told = look_after(host, class_id="X16")
    assert [(one.probe, one.verdict) for one in told] == [("shared-memory", "warn")]
    assert look_after(host, class_id="C1") == []
    assert look_after(host, class_id="X16", reported=f"… {told[0].what} …") == []


def test_what_may_stand_behind_a_failure_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have not come (I1), whatever keeps ranks away is asked for, by the classes of the probes."""
    asked: list[str] = []

    def examine(_host: Host, probes: object, *, most_s: float) -> list[Reading]:
        asked.extend(one.id for one in probes)  # type: ignore[attr-defined]
        return []

    monkeypatch.setattr(at_launch, "examine", examine)
    look_after(_make(tmp_path), class_id="I1")
    assert {"hostname", "gloo-variables", "master-address", "shared-memory"} <= set(asked)
    assert "gpus-busy" not in asked
    assert "links" not in asked  # it needs several hosts that meet


def test_fixes_are_told_as_they_are_typed() -> None:
    """The first command of a fix stands behind the arrow, without a remark; where a remark above is itself what is to be done, that."""
    commands = Reading(verdict="fail", what="a", fix="# on node2:\nsudo ufw allow 1\nsudo ufw reload")
    remark = Reading(verdict="fail", what="b", fix="# fewer ranks")
    advice = Reading(verdict="fail", what="c", fix="# a volume: emptyDir: {medium: Memory}\nls -lhS /dev/shm")
    behind = Reading(verdict="fail", what="e", fix="export A=b  # on all hosts")
    assert format_readings([commands, remark, advice, Reading(verdict="fail", what="d"), behind]) == (
        "a -> sudo ufw allow 1",
        "b -> fewer ranks",
        "c -> a volume: emptyDir: {medium: Memory}",
        "d",
        "e -> export A=b",
    )
