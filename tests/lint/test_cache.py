"""What is kept between runs: it saves work, and never changes or breaks a result."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from rankwise.lint.finding import Edit, Finding, Span
from rankwise.lint.running import files
from rankwise.lint.running.cache import Cache, Kept, digest_file
from rankwise.lint.running.files import Outcome, Plan, check_files
from rankwise.lint.running.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

_BROKEN, _SOUND = "import torch\nx = (\n", "import torch\nx = 1\n"
_OLD_NS = 10**18
_FINDING = Finding(
    rule="RW101", failure_class="C1", severity="warning", message="é", fix="f", path="a.py", span=Span(1, 2, 3, 4), cell=5,
    also=(("here", "b.py", Span(1, 1, 1, 1)),), edits=(Edit(span=Span(1, 1, 1, 1), text="x"),),
)  # fmt: skip


def _check(folder: Path, *, cache: Path | None = None) -> Outcome:
    settings = Settings(select=("RW901",), folder=folder)
    return check_files([str(folder)], settings, Plan(jobs=1, cache_folder=cache or folder / ".rankwise_cache"))


def _write(path: Path, text: str) -> None:
    """Write a file; its time tells only its size."""
    path.write_text(text)
    os.utime(path, ns=(_OLD_NS, _OLD_NS + len(text)))


def test_a_finding_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every field of a finding survives."""
    _write(tmp_path / "a.py", "x")
    cache = Cache(tmp_path, "k")
    kept = Kept(findings=(_FINDING,), note="n", num_lines=7)
    cache.keep("a.py", kept, _digests(tmp_path / "a.py"))
    cache.save()
    assert Cache(tmp_path, "k").find("a.py") == kept
    assert Cache(tmp_path, "other").find("a.py") is None


def _digests(*paths: Path) -> dict[str, str]:
    return {str(path): digest_file(str(path)) for path in paths}


def test_the_second_run_checks_nothing_again(tmp_path: Path) -> None:
    """Files are read for their digests only: where those are as they were, all comes from the cache, and the outcome is the same."""
    _write(tmp_path / "a.py", _BROKEN)
    _write(tmp_path / "b.py", _SOUND)
    first = _check(tmp_path)
    assert (first.num_cached, len(first.findings)) == (0, 1)
    second = _check(tmp_path)
    assert (second.num_cached, second.findings, second.num_lines) == (2, first.findings, first.num_lines)


def test_a_change_is_seen(tmp_path: Path) -> None:
    """Another content is checked again, a touched file with the same content is not."""
    _write(tmp_path / "a.py", _SOUND)
    _check(tmp_path)
    os.utime(tmp_path / "a.py")
    assert _check(tmp_path).num_cached == 1
    _write(tmp_path / "a.py", _BROKEN)
    outcome = _check(tmp_path)
    assert (outcome.num_cached, len(outcome.findings)) == (0, 1)


def test_another_version_of_a_library_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found may depend on the library that is installed beside the check."""
    _write(tmp_path / "a.py", _SOUND)
    _check(tmp_path)
    monkeypatch.setattr(files, "versions", lambda: ["torch-9.0.dist-info"])
    assert _check(tmp_path).num_cached == 0


def test_a_change_within_a_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    """Of two files of one size and one time the contents count."""
    path = tmp_path / "a.py"
    _write(path, _SOUND)
    _check(tmp_path)
    _write(path, _SOUND.replace("1", "("))
    assert _check(tmp_path).num_cached == 0


def test_a_module_that_changed_counts(tmp_path: Path) -> None:
    """A result depends on every file that was read for it, also on one that is gone now."""
    for name in ("a.py", "helper.py"):
        _write(tmp_path / name, "x")
    cache = Cache(tmp_path, "k")
    cache.keep("a.py", Kept(findings=()), _digests(tmp_path / "a.py", tmp_path / "helper.py"))
    cache.save()
    assert Cache(tmp_path, "k").find("a.py") is not None
    (tmp_path / "helper.py").unlink()
    assert Cache(tmp_path, "k").find("a.py") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"sources": 3}', '{"sources":[],"entries":{"a":{"sources":[0]}}}', "[" * 99_999],
)
def test_a_damaged_cache_is_none(text: str, tmp_path: Path) -> None:
    """Whatever stands in the file, the check reaches its findings, and the next run has a whole cache."""
    _write(tmp_path / "a.py", _BROKEN)
    _check(tmp_path)
    (index,) = (tmp_path / ".rankwise_cache").glob("check-*.json")
    index.write_text(text)
    assert len(_check(tmp_path).findings) == 1
    assert _check(tmp_path).num_cached == 1


def test_damaged_entries_are_none(tmp_path: Path) -> None:
    """A row that is not what we write is passed over."""
    _write(tmp_path / "a.py", "x")
    cache = Cache(tmp_path, "k")
    cache.keep("a.py", Kept(findings=(_FINDING,)), _digests(tmp_path / "a.py"))
    cache.save()
    index = tmp_path / "check-k.json"
    index.write_text(index.read_text().replace('"rule":"RW101",', ""))
    assert Cache(tmp_path, "k").find("a.py") is None


def test_a_folder_that_cant_be_written_does_no_harm(tmp_path: Path) -> None:
    """Where the cache's folder is a file, the check goes on without one."""
    _write(tmp_path / "a.py", _BROKEN)
    (tmp_path / "taken").write_text("")
    assert len(_check(tmp_path, cache=tmp_path / "taken").findings) == 1
    assert len(_check(tmp_path, cache=tmp_path / "taken" / "deeper").findings) == 1


def test_the_folder_is_told_to_be_a_cache(tmp_path: Path) -> None:
    """Backups and git leave it alone, and a search does not look into it; old indexes go."""
    _write(tmp_path / "a.py", _SOUND)
    folder = tmp_path / ".rankwise_cache"
    folder.mkdir()
    for number in range(6):
        _write(folder / f"check-{number}.json", "{}" * (number + 1))
    _check(tmp_path)
    assert (folder / ".gitignore").read_text() == "*\n"
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert len(list(folder.glob("check-*.json"))) == 4
