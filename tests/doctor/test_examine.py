"""A host is examined to the end whatever a probe does, and what hosts tell is compared."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from fake_hosts import make_host
from rankwise.doctor import examine as examining
from rankwise.doctor.examine import collect_facts, compare_hosts, examine
from rankwise.doctor.probe import Probe, Reading, find_worst, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rankwise.doctor.host import Host
    from rankwise.doctor.probe import Facts


def _make(name: str, look: object, compare: object = None) -> Probe:
    return Probe(id=name, title=name, topic="limits", speed="instant", look=look, compare=compare)  # type: ignore[arg-type]


def test_a_probe_that_fails_costs_no_other(tmp_path: Path) -> None:
    """Its reading says that it failed, where, and that this is our mistake; the next one is asked all the same."""

    def broken(_host: Host) -> Iterator[Reading]:
        yield ok("so far")
        raise ZeroDivisionError("by nothing")

    found = examine(make_host(tmp_path), [_make("broken", broken), _make("good", lambda _: [ok("fine")])])
    assert [(one.probe, one.verdict, one.hosts) for one in found] == [
        ("broken", "skipped", ("host0",)),
        ("good", "ok", ("host0",)),
    ]
    assert "ZeroDivisionError: by nothing at test_examine.py:" in found[0].why


def test_a_probe_that_hangs_costs_its_bound_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as skipped; whoever asked goes on, and so do the other probes."""
    monkeypatch.setitem(examining.BOUND_S, "instant", 0.2)
    release = threading.Event()

    def stuck(_host: Host) -> list[Reading]:
        release.wait(30)
        return []

    found = examine(make_host(tmp_path), [_make("stuck", stuck), _make("good", lambda _: [ok("fine")])])
    release.set()
    assert [one.verdict for one in found] == ["skipped", "ok"]
    assert "no answer within" in found[0].what


def test_hosts_are_compared_by_what_their_probes_have_told(tmp_path: Path) -> None:
    """A comparison gets the merged facts of its probe by host, and its readings name probe and hosts."""

    def tell(host: Host) -> list[Reading]:
        return [ok("one", version=host.env["V"]), ok("two", more=1)]

    def compare(told: Mapping[str, Facts]) -> Iterator[Reading]:
        if len({str(one["version"]) for one in told.values()}) > 1:
            yield Reading(verdict="fail", what=f"{sorted(told)}", fix="# mend it")
        assert all(one["more"] == 1 for one in told.values())

    probe = _make("versions", tell, compare)
    hosts = [make_host(tmp_path, name=f"host{n}", env={"V": str(n)}) for n in range(2)]
    facts = {host.name: collect_facts(examine(host, [probe])) for host in hosts}
    (found,) = compare_hosts([probe], facts)
    assert (found.probe, found.hosts) == ("versions", ("host0", "host1"))
    assert compare_hosts([probe], {"host0": facts["host0"]}) == []


def test_readings_survive_json() -> None:
    """A reading read back from its JSON is the same; anything else is refused with what it is."""
    one = Reading(
        verdict="warn",
        what="w",
        why="y",
        fix="f\ng",
        class_id="I5",
        facts={"a": [1, None, {"b": True}]},
        probe="p",
        hosts=("h",),
    )
    assert Reading.from_json(one.to_json()) == one
    for wrong in ({}, {**one.to_json(), "verdict": "grand"}, {**one.to_json(), "hosts": "h"}):
        with pytest.raises(ValueError, match="not a reading of the doctor"):
            Reading.from_json(wrong)


def test_the_worst_verdict_counts() -> None:
    """A failure outweighs a warning, which outweighs what was skipped; nothing at all is well."""
    assert find_worst([]) == "ok"
    assert find_worst([ok("a"), skipped("b", "c")]) == "skipped"
    assert find_worst([Reading(verdict="warn", what=""), Reading(verdict="fail", what=""), ok("")]) == "fail"
