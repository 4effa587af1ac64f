"""`rankwise check`, as it is typed."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

_BROKEN = "import torch\nprint 'a'\n"
_NO_COMMA = "class T:\n    def __init__(self, gpu_id):\n        import torch\n        self.gpu_id = gpu_id,\n        torch.cuda.set_device(self.gpu_id)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, without the project's own settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path


def _check(*words: str) -> int:
    return main(["check", *words])


_STARTS_RANKS = """\
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=4)


if __name__ == "__main__":
    mp.spawn(work, nprocs=4)
"""


def test_clean_found_and_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where nothing is found, 1 with a finding, 2 for a path that is not there, which is named."""
    (folder / "ok.py").write_text("import torch\n")
    assert _check() == 0
    (folder / "bad.py").write_text(_BROKEN)
    assert _check() == 1
    assert "bad.py:2:1" in capsys.readouterr().out
    assert _check("bad.py", "--exit-zero") == 0
    assert _check("ok.py", "gone.py") == 2
    told = capsys.readouterr()
    assert "gone.py: there is no such file or folder\n" in told.err
    assert "no findings" not in told.out
    (folder / "train.py").write_text("")
    assert _check("trian.py") == 2
    assert "trian.py: there is no such file or folder; did you mean train.py?" in capsys.readouterr().err


def test_nothing_to_check_is_no_clean_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without sources, and one whose only file is no text: exit code 0, the reason, and no word of findings."""
    (folder / "empty").mkdir()
    assert _check("empty") == 0
    assert capsys.readouterr() == ("", "rankwise: no file to check in empty\n")
    (folder / "a.py").write_bytes(b"\0")
    assert _check() == 0
    told = capsys.readouterr()
    assert (told.out, "a.py: not looked at" in told.err) == ("", True)
    assert _check("a.py") == 1
    assert "RW901" in capsys.readouterr().out
    assert _check("empty", "--format", "json") == 0
    assert capsys.readouterr().out == "[]\n"


def test_json_can_be_read_and_goes_to_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a program reads stands alone in the file, and nothing on the terminal."""
    (folder / "bad.py").write_text(_BROKEN)
    assert _check("--format", "json", "--output-file", "out.json") == 1
    assert [one["rule"] for one in json.loads((folder / "out.json").read_text())] == ["RW901"]
    assert capsys.readouterr().out == ""
    assert _check("--output-file", "no/such/folder.txt") == 2


def test_standard_input(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor's text is checked under its file's name, with the source line shown."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(_BROKEN.encode())))
    assert _check("-", "--stdin-filename", "src/x.py") == 1
    told = capsys.readouterr().out
    assert "src/x.py:2:1" in told
    assert "print 'a'" in told


def test_standard_input_without_a_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shebang tells that it is shell; what is read as Python and is none says how to name it."""
    pytest.importorskip("tree_sitter_bash")
    for first, place in (("#!/bin/bash\n", "stdin.sh:2:10: error RW701"), ("", "--stdin-filename x.sh")):
        text = f"{first}torchrun --proc_per_node=4 a.py\n"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert _check("-") == 1
        assert place in capsys.readouterr().out


def test_settings_and_flags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The project's settings hold, --isolated does without, and a wrong word is an error with a guess."""
    (folder / "bad.py").write_text(_BROKEN)
    (folder / "pyproject.toml").write_text('[tool.rankwise.check]\nignore = ["RW901"]\n')
    assert _check() == 0
    assert _check("--isolated") == 1
    assert _check("--isolated", "--ignore", "RW9") == 0
    (folder / "other.toml").write_text("[tool.rankwise.check]\n")
    assert _check("--config", "other.toml") == 1
    capsys.readouterr()
    assert _check("--select", "RW9O1") == 2
    assert "did you mean RW901" in capsys.readouterr().err
    assert _check("--select", "RW999") == 2
    assert "did you mean" not in capsys.readouterr().err
    assert _check("--colour") == 2
    assert _check("--") == 2


def test_diff_and_fix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--diff shows and changes nothing, --fix changes, and what is mended is no finding any more."""
    path = folder / "slip.py"
    path.write_text(_NO_COMMA)
    assert _check("--select", "RW801") == 1
    capsys.readouterr()
    assert _check("--select", "RW801", "--diff") == 1
    assert "+        self.gpu_id = gpu_id\n" in capsys.readouterr().out
    assert path.read_text() == _NO_COMMA
    assert _check("--select", "RW801", "--fix") == 0
    assert path.read_text() == _NO_COMMA.replace("gpu_id,\n", "gpu_id\n")
    assert _check("--select", "RW801", "--diff") == 0


def test_a_command_and_its_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind -- stands a command: it is checked, and the script or module that it starts."""
    pytest.importorskip("tree_sitter_bash")
    (folder / "train.py").write_text(_BROKEN)
    assert _check("--select", "RW901", "--", "torchrun", "--nproc-per-node", "2", "train.py", "--lr", "0.1") == 1
    assert "train.py:2:1" in capsys.readouterr().out
    assert _check("--select", "RW901", "--", "torchrun", "-m", "train") == 1
    assert _check("--select", "RW901", "--", "torchrun", "gone.py") == 2
    assert "gone.py" in capsys.readouterr().err


def test_a_launcher_below_a_launcher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that starts its own ranks is an error where the command starts several of it, and only there."""
    pytest.importorskip("tree_sitter_bash")
    (folder / "own.py").write_text(_STARTS_RANKS)
    assert _check("--select", "RW220", "--", "torchrun", "--nproc-per-node=4", "own.py") == 1
    assert "the command starts 4 processes of it" in capsys.readouterr().out
    assert _check("--select", "RW220", "--", "torchrun", "own.py") == 0
    assert _check("--select", "RW220", "--", "python", "own.py") == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["cd x && A=1 torchrun --proc_per_node=4 train.py"], 1, "<command>:1:22: error RW701"),
        (["torchrun", "--help"], 0, "no findings"),
        (["python", "ok.py"], 0, "no findings"),
        (["ls", "-l"], 0, ""),
    ],
)
def test_commands(words: list[str], code: int, told: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quoted line is a line, a launcher alone has no script, and what starts nothing is not called clean."""
    pytest.importorskip("tree_sitter_bash")
    (folder / "ok.py").write_text("import torch\n")
    assert _check("--", *words) == code
    out, err = capsys.readouterr()
    assert told in out
    assert ("no launcher in this command: nothing was checked" in err) == (not told)
    assert told or not out


def test_the_cache_is_where_it_is_told_to_be(folder: Path) -> None:
    """By flag, or beside the settings; --no-cache writes nothing."""
    (folder / "ok.py").write_text("import torch\n")
    _check("--no-cache")
    assert sorted(path.name for path in folder.iterdir()) == ["ok.py"]
    _check("--cache-dir", "c1")
    _check()
    assert all(list((folder / name).glob("check-*.json")) for name in ("c1", ".rankwise_cache"))


def test_quiet_and_statistics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-q says nothing where nothing was found, --statistics counts rules."""
    (folder / "ok.py").write_text("import torch\n")
    assert _check("-q") == 0
    assert capsys.readouterr().out == ""
    (folder / "bad.py").write_text(_BROKEN)
    assert _check("--statistics") == 1
    assert "     1  RW901  text-is-not-python" in capsys.readouterr().out
