"""Checks of a command before the start: each finds its fault, and is silent about good commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.launcher import checks
from rankwise.launcher.checks import check_command
from rankwise.launcher.command import parse

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.base.findings import Finding


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, on a host without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "count_gpus", lambda: 0)
    (tmp_path / "train.py").write_text("import argparse\n")
    return tmp_path


def _check(line: str) -> list[Finding]:
    argv = line.split()
    return check_command(parse(argv, {}), argv)


def _one(line: str) -> Finding:
    (finding,) = _check(line)
    return finding


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node 4 train.py --lr 1",
        "--nproc-per-node gpu train.py",
        "--nproc-per-node auto train.py",
        "--nproc-per-node privateuseone train.py",
        "--nproc-per-node=2 --standalone train.py",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py",
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint h:1 train.py",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
        "-m package.module --x",
        "--no-python sh -c true",
        "train.py --local_rank 0 --role x --log-dir y --module z",
        "-- train.py --nproc_per_node 2",
        "./train.py",
    ],
)
def test_good_commands_pass_in_silence(line: str) -> None:
    """No false alarm: a good command is started without a word."""
    assert _check(line) == []


@pytest.mark.parametrize("value", ["0", "-1", "--work-dir", "two ranks", "4.0", "", "GPU", "2x"])
def test_a_number_of_ranks_that_is_none(value: str) -> None:
    """L4: a missing or senseless --nproc-per-node is named."""
    argv = [f"--nproc-per-node={value}", "train.py"]
    (finding,) = check_command(parse(argv, {}), argv)
    assert (finding.id, finding.severity) == ("L4", "error")
    assert repr(value) in finding.what
    # A number is no flag that has lost its value.
    assert ("lose its value" in finding.fix) == (value not in {"0", "-1"})


def test_a_script_that_does_not_exist_is_guessed() -> None:
    """The nearest script beside it is offered."""
    finding = _one("tran.py")
    assert (finding.severity, finding.fix) == ("error", "did you mean train.py?")


@pytest.mark.parametrize("name", ["nope.py", "main.py", "sub/nope.py"])
def test_a_script_that_resembles_no_other_is_not_guessed(name: str, folder: Path) -> None:
    """That two names end with .py, or stand in one folder, does not make them near."""
    for other in ("uneven.py", "sub/uneven.py"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("")
    assert "did you mean" not in _one(name).fix
    assert _one("sub/unevn.py").fix == "did you mean sub/uneven.py?"


def test_a_second_command_is_seen() -> None:
    """L5: two commands glued together are told apart."""
    assert "second command" in _check("torchrun --nproc_per_node 2 train.py")[0].fix


@pytest.mark.parametrize("python", ["python", "python3.11"])
def test_python_before_the_script_is_to_be_left_out(python: str) -> None:
    """Who writes `python train.py`, as behind srun, is told to leave out that word."""
    assert _one(f"{python} train.py").fix.startswith(f"leave out '{python}'")


def test_a_module_without_m_is_seen() -> None:
    """A dotted name that is no file was meant as a module."""
    assert _one("package.module").fix == "for a module: -m package.module"


def test_m_with_a_file_is_seen(folder: Path) -> None:
    """-m with a path is a file's name, not a module's."""
    (folder / "sub").mkdir()
    (folder / "sub" / "run.py").write_text("")
    assert "-m sub.run" in _one("-m sub/run.py").fix


def test_a_folder_needs_a_main(folder: Path) -> None:
    """A folder can be run only with __main__.py in it, as by Python itself."""
    (folder / "app").mkdir()
    assert "__main__" in _one("app").what
    (folder / "app" / "__main__.py").write_text("")
    assert _check("app") == []


def test_a_program_that_is_not_found() -> None:
    """--no-python with a name that PATH does not know is refused."""
    assert "no-such-program-at-all" in _one("--no-python no-such-program-at-all").what


def test_run_path_needs_an_absolute_path(folder: Path) -> None:
    """--run-path train.py is refused with the path that was meant; the absolute one is taken."""
    assert str(folder / "train.py") in _one("--run-path train.py").fix
    assert _check(f"--run-path {folder}/train.py") == []
    assert "no script" in _one(f"--run-path {folder}/other.py").what


@pytest.mark.parametrize(
    "flag", ["--nproc_per_node=2", "--nproc-per-node 2", "--nnodes=2", "--standalone", "--master_port 1"]
)
def test_launcher_flags_behind_the_script(flag: str) -> None:
    """L3: torchrun would start one rank in silence; the flag's right place is shown."""
    finding = _one(f"train.py {flag}")
    assert (finding.id, finding.severity) == ("L3", "error")
    assert flag.split("=", maxsplit=1)[0].split(maxsplit=1)[0] in finding.what


@pytest.mark.parametrize("place", ["train.py", "options.py", "config/base.py"])
@pytest.mark.parametrize(
    ("written", "typed"),
    [
        ("parser.add_argument('--nproc_per_node')", "--nproc_per_node"),
        ("parser.add_argument('--nproc-per-node')", "--nproc-per-node"),
        ("nproc_per_node: int = 1", "--nproc-per-node"),
    ],
)
def test_a_script_may_have_such_a_flag_of_its_own(folder: Path, place: str, written: str, typed: str) -> None:
    """If the script, or a file beside or below it, speaks of the flag, it is the script's."""
    (folder / "config").mkdir()
    (folder / place).write_text(f"{written}\n")
    assert _check(f"train.py {typed} 2") == []


def test_a_script_that_only_speaks_of_a_flag_has_none(folder: Path) -> None:
    """`torchrun --nproc_per_node=2 train.py` in a docstring or a comment is a recipe, not an option."""
    (folder / "train.py").write_text(
        '"""Usage: torchrun --nproc_per_node=2 train.py"""\n# --nproc_per_node 2\nprint(1)\n'
    )
    (finding,) = _check("train.py --nproc_per_node=2")
    assert (finding.id, finding.severity) == ("L3", "error")


def test_a_report_without_a_place_is_refused_before_the_job(folder: Path) -> None:
    """After days of training it is too late to learn that the folder of --report does not exist."""
    (folder / "train.py").touch()
    (finding,) = _check("--report nowhere/report.json train.py")
    assert (finding.severity, "nowhere/report.json" in finding.what) == ("error", True)


def test_a_filter_that_shows_no_rank_is_doubted(folder: Path) -> None:
    """--local-ranks-filter 7 with two ranks would lose all output in silence."""
    (folder / "train.py").touch()
    (finding,) = _check("--nproc-per-node 2 --local-ranks-filter 7 train.py")
    assert finding.severity == "warning"


def test_modules_and_programs_may_have_any_flag(folder: Path) -> None:
    """Where the code can't be looked at there is no ground for a refusal."""
    assert _check("-m package --nnodes 2") == []
    assert _check("--no-python sh --nnodes 2") == []


def test_a_script_that_uses_a_package_elsewhere_is_still_warned(folder: Path) -> None:
    """A word of another flag in the script does not excuse this one."""
    (folder / "train.py").write_text("parser.add_argument('--nodes')\n")
    assert _one("train.py --nnodes 2").id == "L3"


def test_a_script_in_a_package_folder(folder: Path) -> None:
    """A script in a folder of its own, with its options in the package beside it, is not refused."""
    for name in ("tools", "pkg"):
        (folder / name).mkdir()
    (folder / "tools" / "train.py").write_text("from pkg.options import parse\n")
    (folder / "pkg" / "options.py").write_text('parser.add_argument("--nnodes")\n')
    assert _check("tools/train.py --nnodes 2") == []


def test_localhost_as_meeting_place_of_several_nodes() -> None:
    """I4: an error where nobody chose it, a warning where somebody did."""
    finding = _one("--nnodes 2 train.py")
    assert (finding.id, finding.severity) == ("I4", "error")
    finding = _one("--nnodes 2 --master-addr localhost train.py")
    assert (finding.id, finding.severity) == ("I4", "warning")
    assert _one("--nnodes 2 --rdzv-endpoint 127.0.0.1:1 train.py").severity == "warning"


def test_all_addresses_of_a_host_are_no_meeting_place_for_others() -> None:
    """I4: node 0 can listen at 0.0.0.0, and another node would look for it on itself."""
    assert _check("--nnodes 2 --node-rank 0 --master-addr 0.0.0.0 train.py") == []
    finding = _one("--nnodes 2 --node-rank 1 --master-addr 0.0.0.0 train.py")
    assert (finding.id, finding.severity) == ("I4", "warning")


def test_a_variable_chooses_the_meeting_place_too() -> None:
    """PET_MASTER_ADDR=127.0.0.1 is a choice, as on the command line: a warning, no refusal."""
    argv = ["--nnodes", "2", "train.py"]
    (finding,) = check_command(parse(argv, {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "1"}), argv)
    assert finding.severity == "warning"


def test_script_arguments_are_no_choice_of_a_meeting_place() -> None:
    """A script's own --master-something says nothing of the launcher's."""
    assert _one("--nnodes 2 train.py --master-weights").severity == "error"


def test_a_node_rank_beyond_the_nodes() -> None:
    """I11: nodes count from 0."""
    found = [finding for finding in _check("--nnodes 2 --node-rank 2 --master-addr h train.py") if finding.id == "I11"]
    assert found[0].severity == "error"


def test_a_range_of_nodes_needs_a_rendezvous_that_knows_ranges() -> None:
    """L10: static with 1:4 never starts."""
    assert "L10" in {finding.id for finding in _check("--nnodes 1:4 --master-addr h train.py")}


def test_c10d_without_an_endpoint() -> None:
    """I21: several nodes can't find each other without a place."""
    assert _one("--nnodes 2 --rdzv-backend c10d train.py").id == "I21"


@pytest.mark.parametrize("flag", ["--node-rank=1", "--master_addr=h", "--master-port=3"])
def test_flags_that_do_nothing_are_told(flag: str) -> None:
    """L9: what only the static rendezvous reads is a warning with c10d."""
    finding = _one(f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 {flag} train.py")
    assert (finding.id, finding.severity) == ("L9", "warning")
    assert flag.split("=", maxsplit=1)[0].replace("_", "-") in finding.what


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """L7 is a warning, as a job may use the CPU."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 2)
    finding = _one("--nproc-per-node 4 train.py")
    assert (finding.id, finding.severity, finding.what) == ("L7", "warning", "4 ranks on 2 GPUs")
    assert _check("--nproc-per-node 2 train.py") == []
    assert _check("--nproc-per-node gpu train.py") == []


def test_one_rank_on_a_host_with_gpus_is_hinted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare `run` starts one rank, as torchrun does, and hints; who asked for one is left alone."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 8)
    assert _one("train.py").severity == "hint"
    assert _check("--nproc-per-node 1 train.py") == []
    assert _check("--nproc_per_node=1 train.py") == []


def test_a_script_argument_does_not_silence_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own --my-nproc asks the launcher for nothing."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 8)
    assert [finding.severity for finding in _check("train.py --my-nproc 4")] == ["hint"]


def test_errors_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops the start stands on top."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 2)
    found = _check("--nproc-per-node 4 --nnodes 2 --master-addr 127.0.0.1 missing.py")
    assert [finding.severity for finding in found] == ["error", "warning", "warning"]


def test_every_finding_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No finding is without a fix, and each is one line."""
    monkeypatch.setattr(checks, "count_gpus", lambda: 2)
    lines = [
        "missing.py",
        "train.py --nnodes 2",
        "--nnodes 2 train.py",
        "--nproc-per-node 0 train.py",
        "train.py",
    ]
    for finding in (finding for line in lines for finding in _check(line)):
        assert finding.fix
        assert "\n" not in finding.what + finding.fix
