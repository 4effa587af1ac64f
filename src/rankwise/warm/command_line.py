"""Another command line for an interpreter that is about to run: another script, other arguments, also for ps and py-spy.

A resident server is started before anybody knows what its ranks are to run. Python reads what to run from its configuration,
after the `site` phase in which the server stands: ``pymain_run_python`` in CPython's Modules/main.c takes ``run_filename`` or
``run_module``, and the folder for sys.path from ``argv[0]``. A fork replaces these three, and the rest goes on as in a
process that was started with them.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from typing import Any

#: What a resident server is told to run, and never does.
NAME = "rankwise-resident"
#: The words of PyConfig that are looked at; it has some sixty fields of a word or two (CPython 3.10 to 3.14).
_NUM_WORDS = 128
_WORD = ctypes.sizeof(ctypes.c_void_p)
_WIDE = ctypes.sizeof(ctypes.c_wchar)


class CommandLine:
    """Where this interpreter keeps what it is going to run; found by the name that stands there now.

    Attributes:
        can_change: Whether all places were found: a build of Python may hide its configuration.
    """

    def __init__(self) -> None:
        before = sys.orig_argv[1 : sys.orig_argv.index(NAME)]
        #: ``-c`` runs the same text whatever its arguments are.
        self._how = "-m" if before[-1:] == ["-m"] else "-c" if before[-2:-1] == ["-c"] else ""
        self._texts: list[int] = []
        self._first: list[int] = []
        get: Any = getattr(ctypes.pythonapi, "_Py_GetConfig", None)
        if get is not None and _WIDE == 4 and self._how != "-c":
            get.restype = ctypes.c_void_p
            with contextlib.suppress(OSError), _Memory() as memory:  # /proc may be hidden
                self._find(memory, get())
        self.can_change = (len(self._texts), len(self._first)) == {"": (1, 1), "-m": (1, 0), "-c": (0, 0)}[self._how]

    def _find(self, memory: _Memory, start: int) -> None:
        wanted = NAME if self._how else _make_absolute(NAME)
        for number, word in enumerate(memory.read_words(start, _NUM_WORDS)):
            if memory.holds(word, wanted):
                self._texts.append(start + number * _WORD)
            elif not self._how and not self._first:
                # A list of strings: argv is the one that begins with the script.
                inner = memory.read_words(word, 1)
                if inner and memory.holds(inner[0], NAME):
                    self._first.append(word)

    def change(self, program: str, args: list[str]) -> None:
        """Run something else.

        Args:
            program: A script, from the current folder, or a module.
            args: Its arguments.
        """
        own = len(sys.orig_argv) - sys.orig_argv.index(NAME)
        sys.orig_argv[-own:] = [program, *args]
        sys.argv[:] = [sys.argv[0], program, *args] if self._how == "-c" else [self._how or program, *args]
        path = program if self._how else _make_absolute(program)
        for place in self._texts:
            ctypes.c_void_p.from_address(place).value = _make_text(path)
        for place in self._first:
            ctypes.c_void_p.from_address(place).value = _make_text(program)


class _Memory:
    """This process's memory, read through the kernel: an address that is none gives nothing, and no crash."""

    def __enter__(self) -> _Memory:
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read(self, address: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, address)
        except (OSError, OverflowError):
            return b""

    def read_words(self, address: int, count: int) -> tuple[int, ...]:
        """Return words from an address on, as many as there are."""
        data = self._read(address, count * _WORD)
        whole = len(data) // _WORD
        return struct.unpack(f"{whole}P", data[: whole * _WORD])

    def holds(self, address: int, text: str) -> bool:
        """Whether a text stands at an address, as C holds it."""
        wanted = _encode(text)
        return bool(address) and self._read(address, len(wanted)) == wanted


def _make_absolute(path: str) -> str:
    """Return a script's path as CPython makes it absolute: in the root folder it begins with two slashes."""
    return path if os.path.isabs(path) else f"{os.getcwd()}{os.sep}{path}"


def _encode(text: str) -> bytes:
    return bytes(ctypes.create_unicode_buffer(text))


def _make_text(text: str) -> int:
    """Return a copy that the interpreter may free at its end."""
    data = _encode(text)
    allocate: Any = ctypes.pythonapi.PyMem_RawMalloc
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    address: int = allocate(len(data))
    ctypes.memmove(address, data, len(data))
    return address
