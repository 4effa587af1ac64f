"""Files that are whole or absent, and the ends of long ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rankwise.base import files
from rankwise.base.files import read_regular, read_tail, write_atomic


@pytest.mark.parametrize("data", ["text \u2013 caf\u00e9", b"\0bytes", ""])
def test_what_is_written_is_read(tmp_path: Path, data: str | bytes) -> None:
    """Text goes out as UTF-8, bytes as they are, and nothing else stays in the folder."""
    path = tmp_path / "report.json"
    write_atomic(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("umask", "mode", "expected"), [(0o022, None, 0o644), (0o077, None, 0o600), (0o077, 0o755, 0o755)]
)
def test_who_may_read_it(tmp_path: Path, umask: int, mode: int | None, expected: int) -> None:
    """The umask decides, as for any file: tracebacks and paths are nobody's business under 077; a mode that is asked for is given."""
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "x", "1", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == expected


def test_the_old_file_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure half-way leaves the old file, and no litter."""
    path = tmp_path / "x"
    path.write_text("old")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    """No folder is made on the way."""
    with pytest.raises(OSError):
        write_atomic(tmp_path / "no" / "x", "1")


@given(data=st.binary(max_size=200), size=st.integers(0, 300))
def test_the_tail_is_the_end(tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int) -> None:
    """The last bytes of a file, all of a short one, none of an absent one."""
    path = tmp_path_factory.getbasetemp() / "tail"
    path.write_bytes(data)
    assert read_tail(path, size) == (data[-size:] if size else b"")
    assert read_tail(path.with_name("absent"), size) == b""


def test_only_regular_files_within_a_bound_are_read(tmp_path: Path) -> None:
    """A pipe is not waited for, a device has no end, and a large file fills the memory: each is an OSError at once."""
    path = tmp_path / "train.py"
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    for other in (tmp_path, Path("/dev/zero"), tmp_path / "absent"):
        with pytest.raises(OSError):
            read_regular(other, 10)
    with pytest.raises(OSError, match="10 bytes, more than 9"):
        read_regular(path, 9)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(tmp_path / "pipe", 10)
