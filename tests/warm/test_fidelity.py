"""A script can't tell how it was started: forked from the warm server, by --cold, or by torchrun.

The scripts in ``probes/`` write down what they see. What may differ is listed here, each with its reason; whatever
else differs fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import (
    IS_COMPARABLE,
    RANKWISE,
    TORCHRUN,
    Running,
    Terminal,
    free_port,
    make_env,
    run_rankwise,
    without_patience,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

pytestmark = [pytest.mark.linux, pytest.mark.checked]

PROBES = Path(__file__).parent / "probes"
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "warm": RANKWISE,
    "resident": (*RANKWISE, "--resident"),
    "cold": (*RANKWISE, "--cold"),
    "torchrun": TORCHRUN,
}

#: Facts that may differ between any two ways to start a rank, and why. The left side is a pattern.
MAY_DIFFER = {
    "*environment*/MASTER_PORT": "a free port for each job",
    "*environment*/TORCHELASTIC_RUN_ID": "a random name for each job",
    "*environment*/TORCHELASTIC_ERROR_FILE": "in the job's folder for logs",
    "*environment*/DUMP_TO": "where this test keeps the facts",
    "hash": "drawn anew by each interpreter; ranks that are forked share the server's, so --cold is there",
    "number of modules": "what the server has imported is there before the script imports it",
    "threads of the system": "OpenBLAS starts its threads when it is imported, in a forked rank when it is first used",
    "atexit": "callbacks of the modules that are loaded already",
}
#: What may differ from torchrun beside that: chosen by rankwise, warm or cold.
MAY_DIFFER_FROM_TORCHRUN = {
    "faulthandler": "the recorder keeps the stack of a crash",
    "signals with torch/faulthandler": "as before",
    "descriptors/100": "notes of the recorder",
    "descriptors/101": "stacks of the recorder",
    "descriptors/103": "the rank's evidence",
    "descriptors/104": "questions about it",
    "descriptors/2": "rankwise reads standard error by a pipe, for its report",
    "streams/stderr*": "as before",
    "parent dies": "rankwise has the kernel end the ranks with it, torchrun leaves orphans",
    "status/SigCgt": "the recorder's signal for stacks, and what faulthandler catches",
}
if not IS_COMPARABLE:
    MAY_DIFFER_FROM_TORCHRUN |= {
        "*environment*/MASTER_ADDR": "torchrun before 2.13 writes localhost as an address",
        "*environment*/TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun before 2.13 has no such variable",
    }


@dataclass(frozen=True, slots=True)
class Setting:
    """What a probe is started with.

    Attributes:
        may_differ: What may differ from torchrun in this setting only, and why.
    """

    args: Sequence[str]
    env: Mapping[str, str | None] = field(default_factory=dict)
    stdin: str | None = None
    before: Callable[[], None] | None = None
    may_differ: Mapping[str, str] = field(default_factory=dict)


def restrict() -> None:
    """Give the launcher limits and settings that are not the usual ones; its ranks inherit them."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


SETTINGS = {
    "script": Setting(
        ["facts.py", "a b", "--lr=1", "", "--"],
        may_differ={
            "*environment*/OMP_NUM_THREADS": "torchrun says 1; rankwise gives each rank its share of the cores",
            "threads of torch": "follows from that",
            "threads that calculate": "follows from that",
            "default": "the text of torch's parallel settings, which names that number",
        },
    ),
    "module, many variables": Setting(
        ["-m", "pkg.facts", "x"],
        {
            "PYTHONPATH": "extra:{folder}/other", "PYTHONOPTIMIZE": "1", "PYTHONHASHSEED": "7", "PYTHONUTF8": "1", "TZ": "Asia/Tokyo",
            "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "2", "ODD": "a\udcff\n'b", "OMP_WAIT_POLICY": "passive", "EMPTY": "",
            "PYTHONDONTWRITEBYTECODE": None,  # else each import would compile all of torch anew for PYTHONOPTIMIZE
        },
    ),
    "restricted": Setting(
        ["facts.py"],
        {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "4", "LC_ALL": "C", "PYTHONPATH": "", "READS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore",
         "PYTHONDONTWRITEBYTECODE": "1"},
        stdin="first\nsecond\n",
        before=restrict,
        may_differ={
            "signals*/SIG*": "torchrun takes over the signals that end a job, so its ranks lose the nohup of their user",
            "status/SigIgn": "as before",
        },
    ),
}  # fmt: skip


def run_probe(how: str, setting: Setting, folder: Path) -> list[dict[str, Any]]:
    """Run a probe on two ranks and return, by rank, what it wrote down."""
    to = folder / f"dump_{how}"
    to.mkdir()
    env = {name: value and value.replace("{folder}", str(folder)) for name, value in setting.env.items()}
    logs = [] if how == "torchrun" else ["--log-dir", str(folder / f"log_{how}")]
    if how == "torchrun" and not IS_COMPARABLE:
        logs = ["--master-port", str(free_port())]  # else 29500, which another test may have
    command = [*LAUNCHERS[how], *logs, "--nproc-per-node", "2", *setting.args]
    env["DUMP_TO"] = str(to)
    if how == "resident":  # the server has been started for something else
        write_script(folder / "elsewhere", "import torch", "pkg/facts.py")
        write_script(folder / "elsewhere", "import torch", "facts.py")
        first = [*LAUNCHERS[how], "--nproc-per-node", "2", *("-m", "pkg.facts")[: 2 * ("-m" in setting.args)]]
        other = {**env, "DUMP_TO": "nowhere", "ANOTHER": "variable"}
        first += [] if "-m" in setting.args else [*setting.args[: setting.args.index("facts.py")], "facts.py"]
        ended = Running(first, folder / "elsewhere", env=other, preexec_fn=setting.before).finish()
        assert ended.code == 0, ended.err
    result = Running(command, folder, env=env, stdin=setting.stdin, preexec_fn=setting.before).finish()
    assert result.code == 0, f"{how}: {result.err}"
    if how != "torchrun":
        assert without_patience(result.err) == "", how
        assert was_warm(folder / f"log_{how}") == (how in {"warm", "resident"})
    return [json.loads((to / f"{rank}.json").read_text()) for rank in range(2)]


def was_warm(logs: Path) -> bool:
    """Return whether the only job in a folder of logs had its ranks forked."""
    (file,) = logs.glob("*/events.jsonl")
    return "warm.ready" in [json.loads(line)["event"] for line in file.read_text().splitlines()]


def flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Give the entries of dictionaries names of their own, as "environment/RANK"."""
    flat = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat


def list_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], permitted: Iterable[str]
) -> dict[str, tuple[Any, Any]]:
    """Return what differs without leave."""
    one, other, permitted = flatten(one), flatten(other), list(permitted)
    return {
        name: (one.get(name, "(none)"), other.get(name, "(none)"))
        for name in sorted({*one, *other})
        if one.get(name, "(none)") != other.get(name, "(none)")
        and not any(fnmatch(name, pattern) for pattern in permitted)
    }


@pytest.mark.timeout(400)  # torch is imported a dozen times
@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_sees_the_same_however_it_is_started(name: str, tmp_path: Path) -> None:
    """No fact about its process that a script can look at tells warm from cold, nor from torchrun, save those listed.

    And what is random is: no two ranks draw the same, though they were forked from one process.
    """
    setting = SETTINGS[name]
    shutil.copytree(PROBES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROBES / "facts.py", tmp_path / "pkg" / "facts.py")
    (tmp_path / "extra").mkdir()
    seen = {how: run_probe(how, setting, tmp_path) for how in LAUNCHERS}
    # Python 3.12 starts with some hundred frozen objects.
    assert [[rank["frozen"] > 1000 for rank in seen[how]] for how in ("warm", "cold")] == [
        [True] * 2,
        [False] * 2,
    ]
    found = {}
    for other, more in (
        ("resident", {}),
        ("cold", {}),
        ("torchrun", {**MAY_DIFFER_FROM_TORCHRUN, **setting.may_differ}),
    ):
        for rank in range(2):
            differences = list_differences(
                seen["warm"][rank]["facts"], seen[other][rank]["facts"], [*MAY_DIFFER, *more]
            )
            found |= {f"{key}, warm and {other}, rank {rank}": values for key, values in differences.items()}
    assert not found, "\n".join(f"{key}:\n    {ours}\n    {theirs}" for key, (ours, theirs) in found.items())
    for key in seen["warm"][0]["drawn"]:
        drawn = [rank["drawn"][key] for how in LAUNCHERS for rank in seen[how]]
        assert len(set(drawn)) == len(drawn), f"{key}: {drawn}"


@pytest.mark.parametrize(("script", "ranks", "against"), [("children.py", 2, "torchrun"), ("loaders.py", 1, "cold")])
def test_a_ranks_own_processes_are_the_same(script: str, ranks: int, against: str, tmp_path: Path) -> None:
    """Pools, executors, managers, shared memory and data loaders do the same in a forked rank, by fork, spawn and forkserver.

    Nothing of ours is in the environment, sys.path or descriptors of a rank's children.
    """
    shutil.copytree(PROBES, tmp_path, dirs_exist_ok=True)
    seen = {}
    for how in ("warm", "resident", against):
        (to := tmp_path / f"dump_{how}").mkdir()
        logs = [] if how == "torchrun" else ["--log-dir", str(tmp_path / f"log_{how}")]
        env = {"DUMP_TO": str(to), "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore"}
        args = [*logs, "--nproc-per-node", str(ranks), script, "word"]
        result = run_rankwise(args, tmp_path, env=env, launcher=LAUNCHERS[how])
        assert (result.code, result.out) == (0, ""), f"{how}: {result.err}"
        seen[how] = [json.loads((to / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert was_warm(tmp_path / "log_warm")
    forked = {
        "fork sees/torch": "it is there already",
        "fork sees/descriptors": "those of the recorder are closed by exec only",
    }
    for how in ("warm", "resident"):
        for ours, theirs in zip(seen[how], seen[against], strict=True):
            assert not list_differences(ours, theirs, forked), how


def test_a_script_ends_as_under_plain_python(tmp_path: Path) -> None:
    """Exit code, standard output and standard error are plain Python's, byte for byte, in each way a script can end.

    Tracebacks (also of threads, groups, hooks), warnings, unraisable errors, the order of atexit, what threads still
    print, a crash: one attempt of one job for each.
    """
    script = tmp_path / "endings.py"
    shutil.copy(PROBES / "endings.py", script)
    num_attempts = script.read_text().split("ENDINGS = [")[1].split("\n]")[0].count("\n")
    args = ["--log-dir", "log", "-r", "3", "--max-restarts", str(num_attempts - 1), "endings.py"]
    result = run_rankwise(args, tmp_path, timeout_s=100)
    assert result.code == 0, result.err
    (job,) = (tmp_path / "log").iterdir()
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    codes = [event["code"] for event in events if event["event"] == "rank.ended"]
    found = {}
    for attempt in range(num_attempts):
        logs = job / f"attempt_{attempt}" / "0"
        env = make_env({"TORCHELASTIC_RESTART_COUNT": str(attempt)})
        plain = subprocess.run([sys.executable, "-u", "endings.py"], cwd=tmp_path, env=env, capture_output=True, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        ours = [
            codes[attempt],
            *_mask((logs / "stdout.log").read_bytes(), (logs / "stderr.log").read_bytes()),
        ]
        theirs = [plain.returncode, *_mask(plain.stdout, plain.stderr)]
        assert (ours[1][0], theirs[1][0]) == ("frozen", "fresh"), attempt
        if [ours[0], ours[1][1:], ours[2]] != [theirs[0], theirs[1][1:], theirs[2]]:
            found[attempt] = (ours, theirs)
    assert not found, "\n".join(f"{attempt}:\n  {ours}\n  {theirs}" for attempt, (ours, theirs) in found.items())


def _mask(out: bytes, err: bytes) -> tuple[list[str], list[str]]:
    """Return the lines without addresses, and without the list of extension modules that a crash report ends with."""
    shown, errors = (re.sub(r"0x[0-9a-f]+", "0x", text.decode()) for text in (out, err))
    return shown.splitlines(), re.sub(r"\n+Extension modules:.*", "", errors).splitlines()


@pytest.mark.parametrize("has_dill", [True, False])
def test_the_interpreter_takes_the_same_apart(has_dill: bool, tmp_path: Path) -> None:
    """At exit, atexit runs in order, then __del__ of the same objects of the script, cycles and all.

    The collector promises no order among cycles. With dill, torch holds __main__ itself: much is never taken apart.
    """
    shutil.copy(PROBES / "leftovers.py", tmp_path)
    if not has_dill:
        write_script(tmp_path, "def extend(use_dill): pass", "path/dill.py")
    env = {"PYTHONPATH": str(tmp_path / "path")}
    shown = {}
    for how in ("warm", "cold"):
        result = run_rankwise(["--log-dir", how, "leftovers.py"], tmp_path, env=env, launcher=LAUNCHERS[how])
        assert (result.code, result.err) == (0, "")
        assert was_warm(tmp_path / how) == (how == "warm")
        shown[how] = result.out.splitlines()
    end = shown["cold"].index("del of the module")
    assert shown["warm"][: end + 1] == shown["cold"][: end + 1]
    assert sorted(shown["warm"]) == sorted(shown["cold"])


def test_streams_know_whether_they_can_seek(tmp_path: Path) -> None:
    """A pipe can't be positioned and a file can: each stream of a rank tells what its own descriptor is."""
    script = """
        import os, sys
        if 0: import torch
        streams = sys.stdin, sys.stdout, sys.stderr
        os.write(1, repr([[s.seekable(), s.buffer.seekable(), s.isatty()] for s in streams]).encode())
        try:
            os.write(1, repr(sys.stdin.seek(0)).encode())
        except OSError as error:
            os.write(1, repr(error).encode())
        os.write(1, sys.stdin.read().encode())
        """
    write_script(tmp_path, script)
    for redirect in ([], ["-r", "3"]):
        shown = []
        for how in ("warm", "cold"):
            args = ["--log-dir", how, *redirect, "train.py"]
            result = run_rankwise(args, tmp_path, stdin="from a pipe", launcher=LAUNCHERS[how])
            logs = sorted((tmp_path / how).glob("*/attempt_0/0/stdout.log"))
            shown.append(logs[0].read_text() if logs else result.out)
        assert shown[0] == shown[1]


def test_on_a_terminal_a_rank_sees_the_same(tmp_path: Path) -> None:
    """On a terminal, streams, sessions, signals and all other facts are the same, warm and cold."""
    shutil.copy(PROBES / "facts.py", tmp_path)
    seen = {}
    for how in ("warm", "cold"):
        (to := tmp_path / f"dump_{how}").mkdir()
        command = [*LAUNCHERS[how], "--log-dir", f"log_{how}", "facts.py"]
        with Terminal(command, tmp_path, {"DUMP_TO": str(to)}) as terminal:
            assert terminal.finish().code == 0, terminal.text
        assert was_warm(tmp_path / f"log_{how}") == (how == "warm")
        seen[how] = json.loads((to / "0.json").read_text())["facts"]
    assert not list_differences(seen["warm"], seen["cold"], MAY_DIFFER)


def test_a_debugger_reads_its_commands(tmp_path: Path) -> None:
    """``-m pdb`` with commands on standard input shows what it shows under plain Python."""
    write_script(tmp_path, "import torch\nx = 41\n\ndef f(y):\n    return y + 1\n\nprint(f(x))\n")
    commands = "b 5\nc\np x, y\nw\nu\nl\nc\nq\n"
    args = ["--log-dir", "log", "-m", "pdb", "train.py"]
    ours = run_rankwise(args, tmp_path, stdin=commands)
    plain = subprocess.run([sys.executable, "-u", "-m", "pdb", "train.py"], cwd=tmp_path, env=make_env(), input=commands, capture_output=True, text=True, check=False)  # fmt: skip
    assert ours.out == plain.stdout
    assert "(41, 41)" in ours.out
    assert ours.code == plain.returncode
    assert was_warm(tmp_path / "log")


@pytest.mark.skipif(importlib.util.find_spec("coverage") is None, reason="needs coverage")
def test_coverage_is_the_same(tmp_path: Path) -> None:
    """``-m coverage run`` measures the lines that it measures under plain Python."""
    write_script(tmp_path, "import torch\n\ndef f(y):\n    if y:\n        return 1\n    return 2\n\nf(1)\n")
    reports = []
    for how in ("warm", "cold"):
        args = ["-m", "coverage", "run", f"--data-file={how}", "train.py"]
        assert run_rankwise(args, tmp_path, launcher=LAUNCHERS[how]).code == 0
        shown = subprocess.run([sys.executable, "-m", "coverage", "report", "-m", f"--data-file={how}"], cwd=tmp_path, capture_output=True, text=True, check=True)  # fmt: skip
        reports.append(shown.stdout)
    assert reports[0] == reports[1]
