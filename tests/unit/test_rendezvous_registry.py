"""The judge of the registry: who is absent, doubled, of another world, on the same GPU, or runs something else."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.evidence.in_rank.rendezvous_registry import (
    conclude,
    describe_process,
    find_loopback,
    judge,
    name_ranks,
)


def make(rank: int, **other: Any) -> dict[str, Any]:
    """Return the record of a rank of a world of 4 on another machine, so that nobody asks whether it lives."""
    base = {
        "rank": rank, "world_size": 4, "local_rank": rank, "host": "h0", "boot": "elsewhere", "space": "1", "pid": 100 + rank, "started": "1",
        "torch": "2.13.0", "python": "3.11.7", "script": "/job/train.py", "script_hash": "aa", "job": "j", "loopback": "", "device": None,
        "backend": "gloo", "nccl": "",
    }  # fmt: skip
    return {**base, **other}


WORLD = [make(rank) for rank in range(4)]


def texts(records: list[dict[str, Any]], waited_s: float | None = None) -> str:
    """Return all that the judge says."""
    return "\n".join(problem["text"] for problem in judge(records, waited_s))


def test_a_sound_world_has_no_problem() -> None:
    """Four ranks that fit together are fine, however long they were waited for."""
    assert judge(WORLD, None) == judge(WORLD, 60.0) == []


def test_absent_ranks_are_named_only_after_the_wait() -> None:
    """While ranks may still come nobody is absent; then they are named, and so are those who came."""
    here = [WORLD[0], WORLD[2]]
    assert judge(here, None) == []
    assert (
        "after 60 s ranks 1, 3 of 4 have not arrived; arrived: rank 0 (pid 100 on h0), rank 2 (pid 102 on h0)"
        in texts(here, 60.0)
    )


def test_doubles_name_both_processes_and_who_is_nobody() -> None:
    """Two processes of one rank are both named, with the rank that nobody claims."""
    told = texts([WORLD[0], make(1), make(1, pid=7, host="h1"), make(2)])
    assert "2 processes claim rank 1: pid 101 on h0 and pid 7 on h1; no process claims rank 3 so far" in told


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"world_size": 3}, "the ranks disagree about the world size: 4 on rank 0 (pid 100 on h0), rank 1 (pid 101 on h0), rank 2 (pid 102 on h0); 3 on rank 3"),
        ({"rank": 4}, "rank 4 (pid 103 on h0): the ranks of a world of 4 are 0 to 3"),
        ({"torch": "2.8.0"}, "different versions of torch: 2.13.0: rank 0"),
        ({"backend": "nccl"}, "different backends: gloo: rank 0"),
        ({"script_hash": "bb"}, "train.py is not the same file on all ranks: aa: rank 0"),
    ],
)  # fmt: skip
def test_the_odd_one_is_named_with_both_values(odd: dict[str, Any], text: str) -> None:
    """Whatever must be the same on all ranks and is not is told with each value and who holds it."""
    assert text in texts([*WORLD[:3], {**make(3), **odd}])


def test_job_ids_are_evidence_and_no_cause() -> None:
    """Ids that differ, or lack, are no mistake; doubles of different jobs are told so."""
    assert judge([make(rank, job=str(rank) if rank else "") for rank in range(4)], None) == []
    assert "(of the jobs j, k); no process claims ranks 2-3" in texts([make(0), make(1), make(1, job="k")])


def test_two_files_are_a_job_too() -> None:
    """rank0.py and rank1.py, started by hand, are no mistake."""
    assert judge([make(rank, script=f"/job/rank{rank}.py", script_hash=str(rank)) for rank in range(4)], None) == []


def test_two_ranks_on_one_gpu() -> None:
    """With NCCL, a GPU that two ranks of a host use is named; the same number on another host is another GPU."""
    cuda = [
        make(rank, backend="cpu:gloo,cuda:nccl", device=f"GPU-{rank % 2}", boot=f"b{rank // 2}") for rank in range(4)
    ]
    assert judge(cuda, None) == []
    cuda[1] = {**cuda[1], "device": "GPU-0"}
    assert "rank 0 (pid 100 on h0), rank 1 (pid 101 on h0) use the same GPU GPU-0" in texts(cuda)


def test_hosts_found_at_loopback_addresses() -> None:
    """Several hosts, one of which finds itself at 127.0.1.1 by its name: Gloo would listen there."""
    hosts = [make(rank, host=f"h{rank}", loopback="127.0.1.1" if rank == 2 else "") for rank in range(4)]
    assert "h2 is 127.0.1.1" in texts(hosts)
    assert judge([{**record, "host": "h0"} for record in hosts], None) == []


def test_processes_of_one_launch_that_claim_one_rank_are_no_leftover() -> None:
    """Local ranks 1 and 2 of one parent both claim rank 1 of 2, and one has ended: that is told first, and not that it came and went."""
    own = describe_process(rank=0, world_size=2)
    one, other = ({**own, "rank": 1, "given": given} for given in "12")
    (first, *_) = judge([{**own, "given": "0"}, {**other, "pid": 2**22 + 1}, one], None)
    assert first["kind"] == "clash"
    assert (
        f"2 processes claim rank 1: pid {own['pid']} on {own['host']} with LOCAL_RANK 1 and pid 4194305"
        in first["text"]
    )
    assert first["local_ranks"] == "1 2"
    # A second start of the same place is an earlier run's, and so may be one below another launcher.
    for given, parent in (("1", own["parent"]), ("2", own["parent"] + 1)):
        again = {**one, "given": given, "parent": parent, "pid": 2**22 + 1}
        assert judge([one, again], None)[0]["kind"] == "gone"


def test_a_process_that_has_ended_is_seen() -> None:
    """A record of this machine whose process is gone is told; our own is not."""
    own = describe_process(rank=0, world_size=2)
    dead = {**own, "rank": 1, "pid": 2**22 + 1}
    assert judge([own, {**own, "rank": 1}], None) == []
    assert "rank 1 (pid 4194305" in texts([own, dead])
    assert "left before all had joined" in texts([own, dead])


def test_the_verdict_tells_each_rank_its_place() -> None:
    """Where some rank does not know its local rank, the ranks of each host are listed, in the order of ranks."""
    records = [make(rank, local_rank=None, host=f"h{rank % 2}") for rank in (3, 1, 0, 2)]
    verdict = conclude(records, None, 5.0)
    assert (verdict["nodes"], verdict["num_nodes"], verdict["problems"]) == ([[0, 2], [1, 3]], 2, [])
    assert conclude(WORLD, None, 5.0)["nodes"] is None


def test_many_ranks_are_named_in_few_words() -> None:
    """A thousand ranks make a short line."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert len(texts([make(0, world_size=9000), make(1, world_size=9000)], 60.0)) < 300
    assert len(texts([make(rank, world_size=2000 + rank % 2) for rank in range(2000)])) < 1200


def test_a_named_interface_is_believed() -> None:
    """With GLOO_SOCKET_IFNAME set, the host's own name does not matter."""
    assert find_loopback("eth0") == ""
