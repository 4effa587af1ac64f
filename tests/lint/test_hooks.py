"""The definitions for pre-commit and GitHub: they are valid, and what they run finds what it should."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
BROKEN = "import torch\n\nx = torch.ones(2)\n\nclass Trainer:\n    def __init__(self, gpu_id):\n        self.gpu_id = gpu_id,\n        self.model = torch.nn.Linear(1, 1).to(self.gpu_id)\n"
BIN = Path(sys.executable).parent


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def hook() -> dict[str, Any]:
    (found,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    return dict(found)


def test_pre_commit_takes_the_definition() -> None:
    """pre-commit itself says that the file is in order."""
    clientlib = pytest.importorskip("pre_commit.clientlib")
    clientlib.load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))


@pytest.mark.parametrize(
    ("name", "is_checked"),
    [("train.py", True), ("a/b.ipynb", True), ("job.sbatch", True), ("job.slurm", True), ("run.sh", True), ("README.md", True),
     ("notes.txt", False), ("train.pyc", False), ("data.json", False)],
)  # fmt: skip
def test_files_of_the_hook(name: str, is_checked: bool) -> None:
    """The hook gets the files that the check reads, batch scripts among them, and no others."""
    assert bool(re.search(hook()["files"], name)) is is_checked


def test_the_hook_finds_and_passes(tmp_path: Path) -> None:
    """What pre-commit runs exits with 1 and tells the rule where there is a mistake, and with 0 where there is none."""
    (tmp_path / "bad.py").write_text(BROKEN)
    (tmp_path / "good.py").write_text("print(1)\n")
    command = shlex.split(hook()["entry"])
    bad = run([*command, "bad.py", "good.py"], tmp_path)
    assert bad.returncode == 1, bad.stderr
    assert "bad.py:7:" in bad.stdout
    assert "RW801" in bad.stdout
    good = run([*command, "good.py"], tmp_path)
    assert (good.returncode, good.stderr) == (0, "")


def action() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8")))


def step(name: str) -> dict[str, Any]:
    return dict(next(one for one in action()["runs"]["steps"] if one.get("name") == name))


def test_inputs_reach_the_shell_by_the_environment_only() -> None:
    """No input is written into a shell script, where it could be a command; each input that is used exists."""
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert all("${{" not in one.get("run", "") for one in action()["runs"]["steps"])
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action()["inputs"])
    assert all(one["description"] for one in action()["inputs"].values())


@pytest.mark.parametrize(("version", "what"), [("", "/the/action"), ("==0.2.0", "rankwise==0.2.0")])
def test_the_action_installs_what_is_asked_for(tmp_path: Path, version: str, what: str) -> None:
    """Without a version the action's own files are installed, with one that release."""
    # Stands in for Python: makes a folder for an environment, and notes what pip is asked for.
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/bash\nif [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; else printf "%s\\n" "$@" >> "$LOG"; fi\n'
    )
    fake.chmod(0o755)
    log = tmp_path / "log"
    done = run(["bash", "-e", "-c", step("Install rankwise")["run"]], tmp_path, RUNNER_TEMP=str(tmp_path), PYTHON=str(fake),
               VERSION=version, ACTION="/the/action", LOG=str(log))  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = log.read_text().splitlines()
    assert words[:3] == ["-m", "pip", "install"]
    assert words[-1] == what


def check_by_action(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    bin_ = folder / "tmp" / "rankwise-check" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "rankwise").symlink_to(BIN / "rankwise")
    wanted = {"PATHS": ".", "ARGS": "", "SARIF_FILE": "", "RUNNER_TEMP": str(folder / "tmp"), **variables}
    return run(["bash", "-e", "-o", "pipefail", "-c", step("Check")["run"]], folder, **wanted)


def test_the_action_tells_github(tmp_path: Path) -> None:
    """The step prints a command for the line and fails; SARIF is written beside it."""
    (tmp_path / "bad.py").write_text(BROKEN)
    done = check_by_action(tmp_path, SARIF_FILE="out.sarif", PATHS="bad.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error file=bad.py,line=7,")
    assert json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "RW801"


def test_the_action_passes_flags(tmp_path: Path) -> None:
    """Flags and several paths reach the command; a clean job ends with 0 and prints nothing."""
    (tmp_path / "bad.py").write_text(BROKEN)
    (tmp_path / "good.py").write_text("print(1)\n")
    done = check_by_action(tmp_path, ARGS="--ignore RW801 --no-cache", PATHS="bad.py\ngood.py\n")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not list(tmp_path.glob(".rankwise_cache"))


def test_the_action_does_not_hide_that_it_could_not_check(tmp_path: Path) -> None:
    """A path that is not there ends the step with 2."""
    assert check_by_action(tmp_path, PATHS="nowhere.py").returncode == 2
