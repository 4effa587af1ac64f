"""Jobs of several nodes that hang: one verdict, with the host's name, and every node ends with it; sound ones go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nodes.hosts import open_hosts, serve_resident
from rankwise.cli.main import main
from support import RANKWISE, TORCHRUN, free_port, line_of, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nodes.hosts import Host

pytestmark = [pytest.mark.linux, pytest.mark.slow]

HOSTS = "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"
HEAD = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
one = torch.ones(3)
for step in range(3):
    dist.all_reduce(one)
"""
OTHER = """
if rank == 2:
    dist.barrier()
    time.sleep(600)
dist.broadcast(one, 2)
"""
ABSENT = """
import os, sys, torch.distributed as dist
if os.environ["RANK"] == "{odd}":
    sys.exit(0)
dist.init_process_group("gloo")
"""
LEFT = """
if rank == {odd}:
    raise SystemExit  # leaves
dist.all_reduce(one)
"""
SLOW = """
if rank == {slow}:
    time.sleep({long_s})  # evaluates
dist.all_reduce(one)  # the others wait
sys.stdout.write("well\\n")
dist.destroy_process_group()
"""
AGAIN = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.barrier() if rank == 1 else dist.broadcast(one, 1)
    time.sleep(600)
sys.stdout.write(f"well, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
"""
SILENT = """
dist.all_reduce(one if rank else one.to(torch.int32))
sys.stdout.write("through\\n")
dist.destroy_process_group()
"""

Answer = tuple[int, str, dict[str, Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Give the hosts of this module."""
    folder = tmp_path_factory.mktemp("pair")
    with open_hosts([HOSTS, HOSTS], folder, lifetime_s=3000) as hosts, serve_resident(hosts, folder):
        yield hosts


def run_nodes(
    pair: list[Host],
    folder: Path,
    text: str,
    *args: str,
    ranks: Sequence[int] = (1, 1),
    launchers: Sequence[tuple[str, ...]] = (RANKWISE, RANKWISE, RANKWISE),
    timeout_s: float = 60,
) -> list[Answer]:
    """Run a script on two hosts, a third node beside the first one's, and return each node's code, output and report."""
    script = write_script(folder, text)
    meet = ["--nnodes", str(len(ranks)), "--master-addr", "10.77.0.1", "--master-port", str(free_port())]
    agents = []
    for node, (num, launcher) in enumerate(zip(ranks, launchers, strict=False)):
        own = ["--node-rank", str(node), "--nproc-per-node", str(num)]
        mine = ["--report", str(folder / f"report.{node}.json"), *args] if launcher is RANKWISE else []
        command = [*launcher, *meet, *own, *mine, str(script)]
        agents.append(pair[node % 2].start(command, {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}))
    try:
        outputs = [agent.communicate(timeout=timeout_s)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    reports = [folder / f"report.{node}.json" for node in range(len(ranks))]
    bodies = [json.loads(path.read_text()) if path.exists() else {} for path in reports]
    return [(agent.returncode, output, body) for agent, output, body in zip(agents, outputs, bodies, strict=True)]


def assert_same_verdict(told: list[Answer]) -> dict[str, Any]:
    """See that all nodes have come to the same, and return it."""
    keys = ("kind", "culprits", "class", "where", "waiting", "message", "fix", "attempts", "exit_code")
    first, *others = [{key: report[key] for key in keys} for _, _, report in told]
    assert all(other == first for other in others), others
    return first


def test_another_collective_on_another_node_is_proved(
    pair: list[Host], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2, first of host1, is in barrier, the others in broadcast: proved without a bound, and told alike by both nodes.

    The folder of node 0 holds the ranks of both nodes, and gives the same verdict again; so does node 1's, which holds its own.
    """
    told = run_nodes(pair, tmp_path, HEAD + OTHER, "--log-dir", str(tmp_path / "logs"), ranks=(2, 2))
    verdict = assert_same_verdict(told)
    assert [code for code, _, _ in told] == [1, 1], told
    assert (verdict["kind"], verdict["culprits"], verdict["class"]) == ("mismatch", [2], "C1")
    assert "rank 2 (host host1, local rank 0) is in barrier" in verdict["message"]
    assert {one["rank"] for one in verdict["waiting"]} == {0, 1, 3}
    seen, keys = [], ("kind", "culprits", "class", "message")
    for _, _, report in told:
        scene = json.loads(Path(report["evidence"], "scene.json").read_text())
        seen.append([rank["rank"] for rank in scene["ranks"]])
        assert main(["report", report["evidence"], "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert [again[key] for key in keys] == [verdict[key] for key in keys]
    assert seen == [[0, 1, 2, 3], [2, 3]]


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_of_another_node_that_has_left_is_proved(odd: int, pair: list[Host], tmp_path: Path) -> None:
    """A node whose ranks have all ended well learns that the others wait for one of them: three nodes, one verdict."""
    told = run_nodes(pair, tmp_path, ABSENT.format(odd=odd), ranks=(1, 1, 1))
    verdict = assert_same_verdict(told)
    assert [code for code, _, _ in told] == [1, 1, 1], told
    assert (verdict["kind"], verdict["culprits"], verdict["class"]) == ("hang", [odd], "I1")
    assert "(host host0, local rank 0) has ended with exit code 0" in verdict["message"]


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_left_its_loop_is_named_by_all_nodes(odd: int, pair: list[Host], tmp_path: Path) -> None:
    """It ends with 0, and its peers lose their connection: none of them failed, and both nodes, also one whose ranks all ended well, name it."""
    told = run_nodes(pair, tmp_path, HEAD + LEFT.format(odd=odd), ranks=(1, 2))
    verdict = assert_same_verdict(told)
    assert [code for code, _, _ in told] == [1, 1], told
    assert (verdict["kind"], verdict["culprits"], verdict["class"]) == ("failure", [odd], "R6")
    assert verdict["where"] == f"{tmp_path / 'train.py'}:6", "the last collective of the rank that left"
    host, local_rank = ("host0", 0) if odd == 0 else ("host1", 1)
    assert f"rank {odd} (host {host}, local rank {local_rank}) has ended with exit code 0" in verdict["message"]


def test_a_stopped_rank_of_another_node_is_named(pair: list[Host], tmp_path: Path) -> None:
    """Rank 1 is stopped: it is said at once on node 0, with its host; somebody may wake it, so only the bound ends the job."""
    text = HEAD + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ndist.all_reduce(one)\n"
    told = run_nodes(pair, tmp_path, text, "--hang-timeout", "6")
    verdict = assert_same_verdict(told)
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [1])
    assert "rank 1 (host host1, local rank 0) is stopped by a signal" in verdict["message"]
    assert "rank 1 (host host1, local rank 0) is stopped by a signal" in told[0][1].partition("the job hung")[0]


def test_one_rank_that_works_for_long_ends_nothing(pair: list[Host], tmp_path: Path) -> None:
    """Rank 0 evaluates alone for 9 s: one node notes what it does, as slow, and the job goes on to its end."""
    told = run_nodes(pair, tmp_path, HEAD + SLOW.format(slow=0, long_s=9))
    assert [code for code, _, _ in told] == [0, 0], told
    assert all(output.count("well\n") == 1 for _, output, _ in told)
    notes = [line for _, output, _ in told for line in output.splitlines() if "rankwise: rank" in line]
    assert len(notes) == 1, told
    assert "it may just be slow" in notes[0]
    assert "host host0" in notes[0]


def test_the_users_bound_ends_all_nodes_alike(pair: list[Host], tmp_path: Path) -> None:
    """Rank 2 sleeps for ever: at the bound both nodes end, with the line where it sleeps."""
    told = run_nodes(pair, tmp_path, HEAD + SLOW.format(slow=2, long_s=600), "--hang-timeout", "5", ranks=(2, 1))
    verdict = assert_same_verdict(told)
    assert [code for code, _, _ in told] == [1, 1], told
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [2])
    assert verdict["where"] == line_of(tmp_path / "train.py", "# evaluates")
    assert "rank 2 (host host1, local rank 0) is sleeping" in verdict["message"]


@pytest.mark.parametrize("ours", [0, 1])
def test_a_node_of_torchrun_is_neither_accused_nor_waited_for(ours: int, pair: list[Host], tmp_path: Path) -> None:
    """One node is torchrun's, and its rank keeps ours waiting for 8 s: nothing is said of what can't be seen, and the job ends well."""
    launchers = (RANKWISE, TORCHRUN) if ours == 0 else (TORCHRUN, RANKWISE)
    told = run_nodes(pair, tmp_path, HEAD + SLOW.format(slow=1 - ours, long_s=8), launchers=launchers)
    assert [code for code, _, _ in told] == [0, 0], told
    output = told[ours][1]
    assert "well\n" in output
    assert not any(word in output for word in ("hung", "answered", "reached", "may be right")), output


def test_a_hang_uses_a_restart_of_all_nodes(pair: list[Host], tmp_path: Path) -> None:
    """Attempt 1 hangs by a barrier on one node; both nodes start again, once, and the second attempt goes through."""
    told = run_nodes(pair, tmp_path, HEAD + AGAIN, "--max-restarts", "1")
    assert [code for code, _, _ in told] == [0, 0], told
    for _, output, report in told:
        assert report["attempts"] == 2
        assert "attempt 1 of 2 failed: the ranks diverged" in output
        assert "well, attempt 1\n" in output


def test_what_was_paired_wrongly_between_nodes_is_told_at_the_end(pair: list[Host], tmp_path: Path) -> None:
    """int32 on host0 is added to float32 on host1 and goes through: with --strict both nodes end with 1, and say the same."""
    told = run_nodes(pair, tmp_path, HEAD + SILENT, "--strict")
    verdict = assert_same_verdict(told)
    assert all("through\n" in output for _, output, _ in told)
    assert [code for code, _, _ in told] == [1, 1], told
    assert (verdict["kind"], verdict["culprits"], verdict["class"]) == ("mismatch", [0, 1], "C7")
    assert "rank 0: host host0; rank 1: host host1" in verdict["message"]
