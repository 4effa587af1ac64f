"""A node of a job is lost, frozen or cut off: all others know in a second, and go on with those that are left, whoever it was."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from nodes.stepping_job import Job, open_job
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.slow]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """One that goes on with one of its three nodes."""
    with open_job(3, "1:3", tmp_path) as made:
        made.start(0, 1, 2)
        made.wait_world(3, [0, 1, 2])
        yield made


def test_a_job_loses_its_nodes_one_after_the_other_and_goes_on_with_the_last(job: Job) -> None:
    """The node that serves the rendezvous is killed first, then the one that has taken that over is stopped by SIGTERM: the last one trains on, and ends well; nothing is left."""
    job.kill(0)
    job.wait_world(2, [1, 2])
    for number in (1, 2):
        assert "node 0 (host host0, rank 0) is lost: its launcher has ended" in job.read(number)
        assert "all ranks restart on the 2 remaining nodes" in job.read(number)
        assert "the node that served the rendezvous is lost: node 1 serves it from now on, at " in job.read(number)
    job.launchers[1].send_signal(signal.SIGTERM)
    job.wait_world(1, [2])
    assert (job.launchers[1].wait(30), "the launcher received SIGTERM" in job.read(1)) == (143, True)
    assert "all ranks restart on the remaining node" in job.read(2)
    (job.folder / "enough").touch()
    assert job.launchers[2].wait(30) == 0, job.read(2)
    assert "\nTraceback" not in job.read(2)  # those of ranks have their rank in front


def test_a_frozen_node_is_given_up_and_joins_again_and_a_cut_one_never_makes_two_jobs_of_one(
    job: Job,
) -> None:
    """Frozen, node 0, which serves the rendezvous, is replaced; awake, it finds that the others went on, and joins them. Then the node that serves is cut off: the others go on, it takes no step alone, and joins them when the network is whole again. So do all when the whole network was down."""
    frozen = job.list_processes(0)
    for process in frozen:
        process.suspend()
    job.wait_world(2, [1, 2])
    assert "the launcher is frozen, or does not get to run" in job.read(1)
    for process in frozen:
        process.resume()
    job.wait_world(3, [0, 1, 2])
    assert "the other nodes continue without this one" in job.read(0)
    assert "another node joins" in job.read(1)
    assert not any("\nTraceback" in f"\n{job.read(number)}" for number in range(3))
    # Now node 1 serves the rendezvous; it may hear one neighbour only, and has to ask whether the other one, which does not come, still lives.
    cut, others = 1, [0, 2]
    job.hosts[cut].call("ip", "link", "set", "cable", "down")
    before = job._size(cut)
    job.wait_world(2, others)
    assert "its host acknowledges nothing: it is down, or cut off" in job.read(0) + job.read(2)
    wait_until(lambda: "is lost" in job.read(cut), 30, "the node that was cut off sees that")
    for _ in range(3):
        job.wait_world(2, others)
    steps = (job.folder / f"steps{cut}").read_text()[before:].split()
    assert not set(steps) - {"3"}, "the node that was cut off has trained on alone"
    job.hosts[cut].call("ip", "link", "set", "cable", "up")
    job.wait_world(3, [0, 1, 2])
    # Now all are cut off from each other: each may wait at a store of its own, and one of these is where they gather.
    said = [len(job.read(number)) for number in range(3)]
    for host in job.hosts:
        host.call("ip", "link", "set", "cable", "down")
    for number in range(3):
        wait_until(lambda number=number: "is lost" in job.read(number)[said[number] :], 30, "each sees it")
    for host in job.hosts:
        host.call("ip", "link", "set", "cable", "up")
    job.wait_world(3, [0, 1, 2])


def test_a_node_that_stands_by_replaces_one_that_is_lost_and_the_rest_end_with_the_job(tmp_path: Path) -> None:  # fmt: skip
    """Two of four hosts have a rank, and that is all the job may have. One dies: without a restart that would count, a third takes its place, the first of those that stood by; the fourth ends well with the job."""
    with open_job(4, "2", tmp_path) as job:
        job.start(0, 1)
        job.wait_world(2, [0, 1])
        for number in (2, 3):
            job.start(number)
            wait_until(lambda number=number: "this node stands by" in job.read(number), 30, "a node that stands by")
        wait_until(lambda: job.list_processes(2)[1:], 10, "the warm server of a node that stands by")
        job.kill(1)
        job.wait_world(2, [0, 2])
        assert "all ranks restart on the remaining node and 1 that stood by" in job.read(0)
        (job.folder / "enough").touch()
        assert [job.launchers[number].wait(30) for number in (0, 2, 3)] == [0, 0, 0], job.read(3)
        assert "the job has ended; this node stood by" in job.read(3)
        assert not (job.folder / "steps3").exists()


def test_nodes_find_the_job_where_it_has_moved(tmp_path: Path) -> None:
    """Of two nodes, one of which serves the rendezvous, that one dies: the other moves, and the third, which stood by, finds it at the reserve. So does the first node, when it is started again as before."""
    with open_job(3, "1:2", tmp_path) as job:
        job.start(0, 1)
        job.wait_world(2, [0, 1])
        job.start(2)
        wait_until(lambda: "this node stands by" in job.read(2), 30, "a node that stands by")
        job.kill(0)
        job.wait_world(2, [1, 2])
        job.kill(2)
        job.wait_world(1, [1])
        job.start(0)  # the same command again: it opens a store where the job first met
        job.wait_world(2, [0, 1])
        (job.folder / "enough").touch()
        assert [job.launchers[number].wait(30) for number in (1, 3)] == [0, 0], job.read(0)
