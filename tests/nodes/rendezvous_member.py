"""One host of a rendezvous, as a program: says what it waits for, and at its end the result as one line of JSON.

Arguments: a dictionary as JSON, with the fields of the plan, and of ``probes`` the ids, ``backend``, ``master_addr``, ``master_port``,
``ahead_s``: how wrong its clock is, and ``hangs``: whether one of its probes waits for ever.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING

from rankwise.base.errors import RankwiseError
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host.examine_hosts import examine_hosts
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.probe import Probe
from rankwise.doctor.registry import find

if TYPE_CHECKING:
    from rankwise.doctor.probe import Reading


class ShiftedClock:
    """A clock that is wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def say(line: str) -> None:
    sys.stdout.write(f"- {line}\n")
    sys.stdout.flush()


def hang(_: Host) -> list[Reading]:
    threading.Event().wait()
    return []


def main() -> int:
    told = json.loads(sys.argv[1])
    told["expected"] = tuple(told.get("expected", ()))
    clock = ShiftedClock(told.pop("ahead_s", 0.0))
    probes = find(*told.pop("probes", []))
    slow = Probe(id="slow", title="waits", topic="network", speed="quick", look=hang)
    probes += (slow,) * told.pop("hangs", False)
    job = JobShape(
        num_nodes=told.get("num_hosts") or 1,
        backend=told.pop("backend", ""),
        master_addr=told.pop("master_addr", ""),
        master_port=told.pop("master_port", None),
    )
    say("begins")
    try:
        found = examine_hosts(Host(clock=clock, job=job), probes, Plan(**told), say)
    except RankwiseError as error:
        failure: dict[str, object] = {"error": str(error), "class": getattr(error, "class_id", "")}
        if isinstance(error, JoinError):
            failure["reading"] = error.to_reading().to_json()
        sys.stdout.write(json.dumps(failure) + "\n")
        return error.exit_code
    sys.stdout.write(json.dumps(to_json(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
