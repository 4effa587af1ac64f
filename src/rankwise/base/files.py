"""Files that are whole or absent, and the ends of long ones."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def fill_standard_streams() -> None:
    """Open /dev/null where standard input, output or error is closed (``<&-``).

    Else the next file that is opened, whatever it is, takes that number, and ranks would print into it. To be called
    before ctypes is
    imported: libffi keeps a file of its own open.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one


def write_atomic(path: str | Path, data: str | bytes, *, mode: int | None = None) -> None:
    """Write ``data`` so that a reader sees the old file or the new one, never a part.

    Args:
        path: The file.
        data: What it is to hold.
        mode: Who may read and write it; None: as for any new file, by the umask.

    Raises:
        OSError: The folder is missing, full or not writable; nothing is left behind.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    # rename(2) is atomic only inside one filesystem, so the temporary file sits beside the final one.
    temporary = path.parent / f".{path.name}.{os.urandom(6).hex()}"
    fd = os.open(
        temporary,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0),
        0o666 if mode is None else 0o600,
    )
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return a file that anybody may have put there: a pipe of that name, or a device, is not waited for.

    Args:
        path: The file; a link to one will do.
        most_bytes: How many are accepted.

    Raises:
        OSError: It can't be opened, is no regular file, or is larger.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - these flags
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {most_bytes}", str(path))
        return file.read(most_bytes)


def read_tail(path: str | Path, size_bytes: int, *, begin: int = 0, end: int | None = None) -> bytes:
    """Return the last ``size_bytes`` of a file between two offsets, to its end by default; nothing if it can't be read."""
    try:
        with Path(path).open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            end = length if end is None else min(end, length)
            start = file.seek(max(begin, end - size_bytes))
            return file.read(max(0, end - start))
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
