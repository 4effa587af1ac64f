"""That a rank has started a job of its own is said, once; its other children are its business."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.process_state import read_process
from rankwise.evidence.reader.scene import Child, Evidence, RankFacts, Scene
from rankwise.launcher.spawned_children import SpawnedChildren
from support import wait_until

pytestmark = pytest.mark.linux
#: A process with a thread of torch's name, which says so.
MEMBER = """
import threading
def work():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("pt_gloo_runloop")
    print("named", flush=True)
    input()
threading.Thread(target=work).start()
"""


def _look(pids: list[int], *, has_come: bool = False) -> list[str]:
    said: list[str] = []
    children = tuple(Child(pid=pid, name="python", state="S") for pid in pids)
    facts = RankFacts(rank=3, pid=1, evidence=Evidence(has_come=has_come), children=children)
    own = SpawnedChildren(said.append)
    for _ in range(2):
        own.look(Scene(ranks=(facts,), world_size=4, now_s=1.0))
    return said


def test_ranks_below_a_rank_are_told_once() -> None:
    """Two children in process groups of their own are a job that nobody watches; one is not, nor are a rank's own workers."""
    members = [
        subprocess.Popen([sys.executable, "-c", MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for one in members:
            assert one.stdout is not None
            one.stdout.readline()
        pids = [one.pid for one in members]
        (line,) = _look(pids)
        assert "rank 3 has started 2 processes with a process group of their own" in line
        assert _look(pids[:1]) == []
        assert _look(pids, has_come=True) == []
    finally:
        for one in members:
            one.kill()
            one.communicate()


#: What multiprocessing's children are called, and what they do.
SPAWNED = "from multiprocessing.spawn import spawn_main\n"


def test_a_script_that_starts_its_own_ranks_is_told() -> None:
    """Below a launcher processes of mp.spawn wait for ever for the store of their rank 0: two that did nothing for half a minute while their parent joins them are named, once. Not one, not a pool or a loader that waits, not those that compute."""
    joins = Stack(frames=(Frame(file="/lib/python3/multiprocessing/process.py", line=9, function="join"),))
    works = Stack(frames=(Frame(file="/job/train.py", line=3, function="<module>"),))
    code = {"idle": "input()", "busy": "while True: pass"}
    started = {
        name: subprocess.Popen([sys.executable, "-c", SPAWNED + code[name[:4]]], stdin=subprocess.PIPE)
        for name in ("idle1", "idle2", "busy")
    }
    other = subprocess.Popen(["sleep", "600"])
    pids = {name: one.pid for name, one in started.items()} | {"other": other.pid}
    try:
        for names, stack, num_lines in (
            (("idle1", "idle2"), joins, 1),
            (("idle1", "idle2"), works, 0),
            (("idle1", "other"), joins, 0),
            (("idle1", "busy"), joins, 0),
        ):
            said: list[str] = []
            own = SpawnedChildren(said.append)
            children = tuple(Child(pid=pids[name], name="python", state="S") for name in names)
            facts = [RankFacts(rank=rank, pid=1, evidence=Evidence(), children=children, stack=stack) for rank in range(2)]  # fmt: skip
            for now_s in (1.0, 32.0):
                own.look(Scene(ranks=tuple(facts), world_size=2, now_s=now_s))
                used = read_process(pids["busy"])
                if "busy" in names:
                    wait_until(lambda used=used: read_process(pids["busy"]).ticks > used.ticks + 60)  # type: ignore[misc, union-attr]
            assert [line.partition(" of its own")[0] for line in said] == [
                "rankwise: rank 0 is in no process group, and waits for 2 processes"
            ] * num_lines
    finally:
        for one in [*started.values(), other]:
            one.kill()
            one.communicate()
