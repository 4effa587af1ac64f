"""Starts the scripts of tests/gpu in real ranks, and reads what they have written down."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pytest

from support import RANKWISE, Result, Running, list_marked, without_patience

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "gpu" / "scripts"
#: Where there is no GPU, the scripts that can may be tried on the CPU: it shows that they run, and nothing about GPUs.
IS_CUDA = os.environ.get("RANKWISE_TEST_DEVICE", "cuda") == "cuda"
#: Without a workspace of fixed size cuBLAS does not promise the same bits.
ENV = {"PYTHONPATH": str(ROOT / "src"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LIMIT_S = 150.0


def start(words: Sequence[str], folder: Path, *, launcher: Sequence[str] = RANKWISE, **env: str | None) -> Running:
    """Start a command of rankwise in the background."""
    (folder / "facts").mkdir(exist_ok=True)
    told = {name: os.environ.get(name) for name in ("RANKWISE_TEST_DEVICE", "CUDA_VISIBLE_DEVICES")}
    return Running([*launcher, *words], folder, env={**ENV, **told, "FACTS": str(folder / "facts"), **env})


def run(words: Sequence[str], folder: Path, **env: str | None) -> Result:
    """Run a command of rankwise to its end."""
    return start(words, folder, **env).finish(LIMIT_S)


def run_reported(words: Sequence[str], folder: Path) -> tuple[Result, dict[str, Any]]:
    """Run with ``--report``, and return the end and the report."""
    result = run(["--report", "report.json", *words], folder)
    assert (folder / "report.json").exists(), result.err
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return result, report


def script(name: str) -> str:
    """Return the path of a script."""
    return str(SCRIPTS / f"{name}.py")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a launch has written down.

    Attributes:
        result: How it ended.
        ranks: The facts of each rank, by name.
    """

    result: Result
    ranks: list[dict[str, Any]]

    def facts(self, name: str) -> list[Any]:
        """Return a fact of each rank; a check that raised, or was never reached, fails the test with what is known."""
        found = [one.get(name, {"traceback": f"not reached\n{self.result.err[-3000:]}"}) for one in self.ranks]  # fmt: skip
        for rank, one in enumerate(found):
            if isinstance(one, dict) and "traceback" in one:
                pytest.fail(f"rank {rank}, {name}: {one['traceback']}", pytrace=False)
        return found

    def fact(self, name: str) -> Any:
        """Return a fact of the only rank."""
        (found,) = self.facts(name)
        return found


def play(words: Sequence[str], folder: Path, num_ranks: int = 1, **env: str | None) -> Scene:
    """Launch a script whose checks write down facts; the launch may fail, and then the tests of what is missing do."""
    for old in (folder / "facts").glob("*.json"):
        old.unlink()
    result = run(["--nproc-per-node", str(num_ranks), *words], folder, **env)
    files = [folder / "facts" / f"{rank}.json" for rank in range(num_ranks)]
    return Scene(result=result, ranks=[json.loads(one.read_text()) if one.exists() else {} for one in files])


def find_complaints(result: Result) -> list[str]:
    """Return the lines of standard error by which rankwise, C++ or Python complains of a rank, and not torch's advice."""
    words = ("rankwise: ", "Traceback", "terminate called", "leaked", "Error")
    return [line for line in without_patience(result.err).splitlines() if any(word in line for word in words)]


def list_open_devices() -> dict[int, list[str]]:
    """Return the device files of NVIDIA that each process of this test has open, the launcher's included."""
    found = {}
    for pid in (int(line.split()[0]) for line in list_marked()):
        links = [_read_link(fd) for fd in Path(f"/proc/{pid}/fd").glob("*")]
        found[pid] = sorted({one for one in links if one.startswith("/dev/nvidia")})
    return found


def read_name(pid: int) -> str:
    """Return the kernel's name of a process."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
