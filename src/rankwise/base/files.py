"""Files that are whole or absent, and the ends of long ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: str | Path, data: str | bytes, *, mode: int = 0o644) -> None:
    """Write ``data`` so that a reader sees the old file or the new one, never a part; ``mode`` is who may read and write it.

    Raises:
        OSError: The folder is missing, full or not writable; nothing is left behind.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    # rename(2) is atomic only inside one filesystem, so the temporary file sits beside the final one.
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_tail(path: str | Path, size_bytes: int) -> bytes:
    """Return the last ``size_bytes`` of a file; nothing if it can't be read."""
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size_bytes))
            return file.read(size_bytes)
    except OSError:
        return b""


def read_all(fd: int) -> str:
    """Return a memory file's text without moving the offset that the rank writes at."""
    parts, at = [], 0
    while chunk := _read_at(fd, at):
        parts.append(chunk)
        at += len(chunk)
    return b"".join(parts).decode("utf-8", "replace")


def _read_at(fd: int, at: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, 1 << 20, at)
    # Windows: there the rank has opened the file by itself, so the offset is ours alone.
    os.lseek(fd, at, os.SEEK_SET)
    return os.read(fd, 1 << 20)
