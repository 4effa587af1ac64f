"""The script's check beside a launch: who has one, what it tells, and that it never stands in the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import LaunchError
from rankwise.launcher import entry_check
from rankwise.launcher.command import parse
from rankwise.launcher.entry_check import EntryCheck, may_check
from rankwise.lint.registry import all_rules
from rankwise.lint.running.entry import NOT_AT_LAUNCH, find_errors
from rankwise.lint.running.files import Plan, check_files
from rankwise.lint.running.settings import Settings

if TYPE_CHECKING:
    from rankwise.launcher.console import Console


class _Heard:
    """A console that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch does not wait for its check for longer than it may hold up a start; on a busy machine a check may take that long."""
    monkeypatch.setattr(entry_check, "_LATE_S", 60.0)


def _begin(words: list[str]) -> tuple[EntryCheck, list[str]]:
    console = _Heard()
    as_console: Console = console  # type: ignore[assignment]
    check = EntryCheck(parse(words, {}), as_console)
    check.start()
    return check, console.said


@pytest.mark.parametrize(
    ("words", "env", "is_checked"),
    [
        (["train.py"], {}, True),
        (["--no-check", "train.py"], {}, False),
        (["train.py"], {"RANKWISE_CHECK": "0"}, False),
        (["--check", "train.py"], {"RANKWISE_CHECK": "0"}, True),
        (["--strict", "train.py"], {"RANKWISE_CHECK": "0"}, True),
        (["--no-check", "--strict", "train.py"], {"RANKWISE_CHECK": "0"}, False),
        (["gone.py"], {}, False),
        (["-m", "train"], {}, False),
        (["--no-python", "train.py"], {}, False),
        (["--nnodes", "2", "--node-rank", "1", "train.py"], {}, False),
    ],
)
def test_who_is_checked(
    words: list[str], env: dict[str, str], is_checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that can be read, on the first node, unless it is switched off; a flag stands over the variable."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    assert may_check(parse(words, env)) is is_checked


def test_a_launch_tells_only_of_rules_that_were_right_on_public_code(tmp_path: Path) -> None:
    """A device by the global rank is right on one node, as most scripts of the kind are run: `check` says it, a launch does not."""
    assert {rule.id for rule in all_rules()} >= NOT_AT_LAUNCH
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n\ndist.init_process_group('nccl')\nrank = dist.get_rank()\n"
        "torch.cuda.set_device(rank)\nif rank == 0:\n    dist.barrier()\n"
    )
    errors = check_files([str(script)], Settings(), Plan(jobs=1)).findings
    assert {one.rule for one in errors if one.severity == "error"} >= {"RW201", "RW102"}
    assert [one.rule for one in find_errors(str(script))] == ["RW102"]


def test_errors_are_told_and_refused_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's modules are not imported, errors are shown with the way to leave them out, and --strict refuses."""
    monkeypatch.chdir(tmp_path)
    for name in ("ast", "json", "torch", "rankwise"):
        Path(f"{name}.py").write_text("open('was_imported', 'w')\n")
    Path("train.py").write_text("import torch\nprint 'a'\n")
    check, said = _begin(["train.py"])
    with pytest.raises(LaunchError, match=r"train\.py"):
        check.refuse_errors()
    (told,) = said
    assert "train.py:2:1" in told
    assert "--no-check" in told
    assert not Path("was_imported").exists()
    check.close()


def test_a_failed_run_waits_for_it_until_somebody_wants_it_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are there when the wait is over; and Ctrl-C ends the wait."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entry_check, "_AFTER_FAILURE_S", 60.0)
    Path("train.py").write_text("import torch\nprint 'a'\n")
    check, said = _begin(["train.py"])
    check.wait(lambda: True)
    assert said == []
    check.wait(lambda: False)
    assert len(said) == 1
    check.close()


def test_strict_stands_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable does not switch off what is typed, and that is said; without it, nothing is."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    for value, num_notes in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANKWISE_CHECK", value)
        check, said = _begin(["--strict", "train.py"])
        check.close()
        assert len(said) == num_notes
        assert all("RANKWISE_CHECK" in one for one in said)


def test_a_clean_script_is_passed_over_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said, and nothing is left in the folder."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    check, said = _begin(["train.py"])
    check.refuse_errors()
    check.close()
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_check_that_cant_start_or_end_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Python there is no check; one that is still at work when the job is over is ended."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nprint 'a'\n")
    check, said = _begin(["train.py"])
    check.close()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    other, more = _begin(["train.py"])
    other.refuse_errors()
    other.close()
    assert more == []
    assert len(said) <= 1
