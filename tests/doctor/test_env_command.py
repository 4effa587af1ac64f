"""`rankwise env` as users see it: text, JSON and exit codes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from field_environments import FOLDER, load
from rankwise.cli.env import main
from rankwise.doctor.variables.understanding import understand

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return what shows one environment: the exit code and what was printed."""

    def run(env: dict[str, str], *flags: str) -> tuple[int, str]:
        monkeypatch.setattr("rankwise.cli.env.environ", lambda: env)
        code = main(flags)
        return code, capsys.readouterr().out

    return run


def show_json(show: Callable[..., tuple[int, str]], env: dict[str, str]) -> dict[str, Any]:
    """Return the JSON for one environment."""
    return json.loads(show(env, "--format", "json")[1])


def test_a_rank(show: Callable[..., tuple[int, str]]) -> None:
    """Each value stands beside the variable it came from, and what others say below."""
    code, text = show(load(FOLDER / "srun_torchrun.json").ranks[3])
    assert code == 0
    assert text.startswith("rank 3 of 4, started by torchrun")
    assert "  world size        4       WORLD_SIZE=4\n" in text
    assert "Slurm  rank 1 of 2 (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)" in text
    assert "OMP_NUM_THREADS=1" in text


def test_a_place_for_a_launcher(show: Callable[..., tuple[int, str]]) -> None:
    """On a node of a cluster the command for this node is shown, and what a script without a launcher would be."""
    code, text = show(load(FOLDER / "sagemaker.json").ranks[1])
    assert code == 0
    assert text.splitlines()[:2] == [
        "no rank, but a place to start a launcher: a host of a SageMaker job, node 1 of 2",
        "  rankwise run --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr algo-1 --master-port 7777 train.py",
    ]
    assert "a script that is started here without a launcher is rank 1 of 2:" in text


def test_nobody_says_anything(show: Callable[..., tuple[int, str]]) -> None:
    """A process alone is told so, and what to do; nothing of its environment is shown."""
    code, text = show({"HOME": "/home/you", "PATH": "/usr/bin"})
    assert code == 0
    assert text.splitlines()[0] == "this process is alone: no variable says it is one of several"
    assert "rankwise run" in text
    assert "/home/you" not in text


@pytest.mark.parametrize(
    ("env", "command"),
    [
        ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "rankwise run --nnodes 2 --node-rank 1 --nproc-per-node auto --master-addr a --master-port 1 train.py"),
        ({"NODE_RANK": "0", "NUM_NODES": "2", "MASTER_ADDR": "a:1"}, "rankwise run --nnodes 2 --node-rank 0 --nproc-per-node auto --master-addr a --master-port 1 train.py"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "0.0.0.0"}, "rankwise run --nnodes NODES --node-rank 1 --nproc-per-node auto --master-addr NODE0 --master-port 29500 train.py"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}, "rankwise run --nnodes NODES --node-rank 0 --nproc-per-node auto --master-addr 10.0.0.1 --master-port 29500 train.py"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, "rankwise run --nnodes NODES --node-rank 1 --nproc-per-node auto --master-addr 10.0.0.1 --master-port 29500 train.py"),
        ({"NNODES": "2", "MASTER_ADDR": "a;b"}, "rankwise run --nnodes 2 --node-rank NODE --nproc-per-node auto --master-addr NODE0 --master-port 29500 train.py"),
    ],
)  # fmt: skip
def test_a_node_by_hand(show: Callable[..., tuple[int, str]], env: dict[str, str], command: str) -> None:
    """NODE_RANK and NNODES, which no launcher reads, still say that this is one of several nodes: the command is for all of them."""
    code, text = show(env)
    assert code == 0
    assert text.startswith("no rank, but a place to start a launcher: one of several nodes, by ")
    assert text.splitlines()[1] == f"  {command}"


@pytest.mark.parametrize(
    "env",
    [
        {"NODE_RANK": "0"},
        {"NODE_RANK": "0", "MASTER_ADDR": "localhost"},
        {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "NNODES": "1"},
        {"MASTER_ADDR": "10.0.0.1"},
    ],
)
def test_what_lies_around_makes_no_node(show: Callable[..., tuple[int, str]], env: dict[str, str]) -> None:
    """Node 0 without a place where others reach is alone, as is a node that is the only one."""
    assert show(env)[1].startswith("this process is alone")


_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "RANK": "1", "WORLD_SIZE": "2"}
_STEP = load(FOLDER / "srun_where_a_launcher_starts.json").ranks[1]
_SKYPILOT = load(FOLDER / "skypilot.json").ranks[1]


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({**_POD, "MASTER_ADDR": "m0:23456"}, "--master-addr m0 --master-port 23456"),
        ({**_POD, "MASTER_ADDR": "m0:23456", "MASTER_PORT": "4000"}, "--master-addr m0 --master-port 4000"),
        ({**_POD, "MASTER_ADDR": "m0;rm", "MASTER_PORT": "99999"}, "--master-addr POD0 --master-port 29500"),
        ({**_POD, "MASTER_ADDR": "localhost"}, "--master-addr POD0 --master-port 29500"),
        ({**_POD, "MASTER_ADDR": "localhost", "RANK": "0"}, "--master-addr localhost --master-port 29500"),
        ({**_STEP, "MASTER_ADDR": "0.0.0.0"}, "--rdzv-endpoint node01:"),
        ({**_STEP, "MASTER_ADDR": "m0:23456"}, "--rdzv-endpoint m0:23456 "),
        ({**_STEP, "MASTER_ADDR": "$(x)", "SLURM_STEP_NODELIST": "$(x)"}, "--rdzv-endpoint NODE0:"),
        ({**_SKYPILOT, "MASTER_ADDR": "127.0.0.1"}, f"--master-addr {_SKYPILOT['SKYPILOT_NODE_IPS'].split()[0]} --master-port "),
        ({**_SKYPILOT, "MASTER_ADDR": "tcp://m0:1"}, "--master-addr m0 --master-port 1 "),
    ],
)  # fmt: skip
def test_no_slip_comes_into_a_command(show: Callable[..., tuple[int, str]], env: dict[str, str], place: str) -> None:
    """A slip is set right, an address that means another host on each node is left out, and what the cluster says or a blank stands there."""
    assert place in show_json(show, env)["place"]["command"]


def test_counts_that_are_none_come_into_no_command() -> None:
    """Less than one node is not told, and a list longer than any job's does not fill the memory."""
    job = load(FOLDER / "sbatch_script.json").ranks[0]
    place = understand({**job, "SLURM_JOB_NUM_NODES": "-2", "SLURM_NNODES": "-2"}).place
    assert place is not None
    assert "srun" not in place.command
    for text in ("1(x999999999999)", "1(x999999999),1(x999999999)", "²", "1(x²)"):
        place = understand({**job, "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_CPUS_PER_NODE": text, "SLURM_TASKS_PER_NODE": text}).place  # fmt: skip
        assert place is not None
        assert "srun --nodes=2 --ntasks=2" in place.command
    place = understand({**job, "SLURM_JOB_NODELIST": "n[1-999999999999]"}).place
    assert place is not None
    assert "--rdzv-endpoint n1:" in place.command
    assert understand({"NODE_RANK": "--2", "NNODES": "9" * 5000}).role == "alone"


@pytest.mark.parametrize("env", [{"LOCAL_RANK": "3"}, {"PMIX_RANK": "2", "PMIX_NAMESPACE": "ns"}])
def test_half_a_set_is_not_alone(show: Callable[..., tuple[int, str]], env: dict[str, str]) -> None:
    """A variable that says that there are others is told, in JSON as the problem; nothing claims that the process is alone."""
    code, text = show(env)
    assert code == 0
    assert text.startswith("it is not clear which rank this is: see below\n\nwarning: ")
    told = show_json(show, env)
    assert told["role"] == "unclear"
    assert told["problem"] == told["findings"][0]["what"]


def test_who_has_no_mpi_is_told_nothing_of_it(show: Callable[..., tuple[int, str]]) -> None:
    """Ranks of RANK and WORLD_SIZE alone are told what to set; flags of mpirun are for ranks of mpirun."""
    text = show({"RANK": "1", "WORLD_SIZE": "2"})[1]
    assert "nothing says where rank 0 is: set MASTER_ADDR and MASTER_PORT, the same for all ranks\n" in text
    assert "Open MPI" not in text
    assert "mpiexec -genv MASTER_ADDR HOST" in show(load(FOLDER / "sbatch_mpich_2_nodes.json").ranks[3])[1]


def test_a_launcher_is_started_once_on_each_node(show: Callable[..., tuple[int, str]]) -> None:
    """The command in an allocation for ranks starts one task a node, and says what must be asked for where CPUs and GPUs were counted by task."""
    job = {"SLURM_JOB_ID": "99", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "12", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip
    place = show_json(show, {**job, "SLURM_GPUS_PER_TASK": "1"})["place"]
    assert place["command"].startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 rankwise run --nnodes 2 --nproc-per-node 8 ")  # fmt: skip
    assert "--cpus-per-task, --gpus-per-node" in place["note"]


def test_a_contradiction_is_exit_code_1(show: Callable[..., tuple[int, str]]) -> None:
    """An error is shown with its class, consequence and remedy, and ends with 1; a warning ends with 0."""
    code, text = show({"RANK": "4", "WORLD_SIZE": "4"})
    assert code == 1
    assert "error: rank 4 of 4: RANK=4, WORLD_SIZE=4 [I11]\n" in text
    code, text = show({"NCCL_SOCKET_IF_NAME": "eth0"})
    assert code == 0
    assert "warning: NCCL_SOCKET_IF_NAME is set, which nothing reads; did you mean NCCL_SOCKET_IFNAME?" in text


def test_an_unclear_rank(show: Callable[..., tuple[int, str]]) -> None:
    """Half of a pair is no rank: what lacks is told, in JSON too."""
    code, text = show({"RANK": "1"})
    assert code == 1
    assert text.startswith("it is not clear which rank this is")
    told = show_json(show, {"RANK": "1"})
    assert (told["role"], told["identity"]) == ("unclear", None)
    assert "WORLD_SIZE is not" in told["problem"]


def test_json(show: Callable[..., tuple[int, str]]) -> None:
    """JSON has the same: identity with sources, place, other sources, findings, variables."""
    told = show_json(show, load(FOLDER / "srun_where_a_launcher_starts.json").ranks[1])
    assert told["role"] == "rank"
    assert told["launcher"] == "srun (Slurm)"
    assert told["identity"]["rank"] == {"value": 1, "from": "SLURM_PROCID=1"}
    assert told["place"]["command"].startswith("rankwise run --nnodes 2 ")
    assert told["findings"] == []
    assert {"name": "SLURM_PROCID", "value": "1", "family": "set by launchers", "does": None} in told["variables"]


def test_ranks_that_know_no_address(show: Callable[..., tuple[int, str]]) -> None:
    """Where nothing tells on which host rank 0 is, the remedy stands below the values."""
    text = show(load(FOLDER / "sbatch_mpich_2_nodes.json").ranks[3])[1]
    assert "nothing says where rank 0 is: pass MASTER_ADDR and MASTER_PORT on to all" in text


def test_escape_sequences_reach_no_terminal(show: Callable[..., tuple[int, str]]) -> None:
    """A value can't move the cursor, paint the screen or begin a line: such signs are written as shells write them."""
    text = show({"NCCL_DEBUG": "\x1b[2J", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "\x1b[31m\nx\u202e", "NCCL_X": "a\n\tb\udcff"})[1]  # fmt: skip
    assert "\x1b" not in text
    assert "\n  NCCL_DEBUG=\\x1b[2J   how much NCCL logs" in text
    assert "\n  NCCL_X=a\\n\\tb\\udcff\n" in text + "\n"
    assert "master address    \\x1b[31m\\nx\\u202e  MASTER_ADDR=\\x1b[31m\\nx\\u202e\n" in text


def test_the_environment_is_not_changed(show: Callable[..., tuple[int, str]]) -> None:
    """Showing changes nothing."""
    before = dict(os.environ)
    show({"RANK": "0", "WORLD_SIZE": "1"})
    assert dict(os.environ) == before


def test_what_it_offers_can_be_pasted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind an arrow stands a command without a remark, and a remark stands above it; a process that is alone gets a whole command."""
    for name, value in {"MASTER_ADDR": "foo:123", "MASTER_PORT": "9", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 1
    told = capsys.readouterr().out.splitlines()
    arrows = [line for line in told if line.startswith("  -> ")]
    assert "  -> export MASTER_ADDR=foo" in arrows
    assert not [line for line in arrows if "#" in line]
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert main([]) == 0
    assert "  rankwise run --nproc-per-node auto train.py" in capsys.readouterr().out.splitlines()
