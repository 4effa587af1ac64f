"""Files that are whole or absent, and the ends of long ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rankwise.base import files
from rankwise.base.files import read_tail, write_atomic


@pytest.mark.parametrize("data", ["text \u2013 caf\u00e9", b"\0bytes", ""])
def test_what_is_written_is_read(tmp_path: Path, data: str | bytes) -> None:
    """Text goes out as UTF-8, bytes as they are, and nothing else stays in the folder."""
    path = tmp_path / "report.json"
    write_atomic(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_it(tmp_path: Path) -> None:
    """The file is not left with the private mode of a temporary one."""
    write_atomic(tmp_path / "x", "1")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


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
