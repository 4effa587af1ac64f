"""Which line of the user's own code a call comes from, in a rank: found once for each place in the code, then remembered.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_TORCHS, _LIBRARYS, _USERS, _SHARDS = range(4)
#: What says nothing about a call: decorators, and how a module is called.
DULL = {
    "wrapper",
    "inner",
    "decorate_context",
    "_fn",
    "_wrapped_call_impl",
    "_call_impl",
    "wrapped",
    "<lambda>",
    "_wrapped",
}
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Functions of torch that are kept: at the collective's end, and at that of the user's line, which called one of them
#: itself.
_MOST_INNER, _MOST_OUTER = 10, 4
_MOST_KEPT = 4096
#: Names of modules that are kept: the table of texts is small.
_MOST_MODULES = 1024
_DECORATORS = f"{os.sep}eager.py"
#: Parts of rankwise whose functions are called by the part's name.
_ROOMS = {"checkpoint", "tf"}


class CallSites:
    """Finds the user's lines.

    Args:
        intern: Returns the number of a text.
        torch_folder: Where torch is installed.
        modules: The module of that name.
    """

    def __init__(self, intern: Callable[[str], int], torch_folder: str, modules: Any) -> None:
        self._intern, self._holds_shards = intern, modules.holds_shards
        self.modules = modules.ModuleNames()
        self._numbers: dict[str, int] = {"": 0}
        self._torch = os.path.join(torch_folder, "")
        self._ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
        self._rankwise = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(self._ours))), "")
        self._library = (os.path.join(os.path.dirname(os.__file__), ""), self._rankwise, "<frozen")
        self._kinds: dict[int, int] = {}
        self._found: dict[tuple[int, ...], tuple[int, int, bool]] = {}
        # Kept, so that an id of a code object never means another one.
        self._codes: list[Any] = []

    def find(self, frame: Any) -> tuple[int, int, bool, int]:
        """Return the numbers of ``file.py:LINE`` and of torch's functions between, whether a blocking message is among them, and the module's number.

        The module is known where FSDP2 gathers or reduces for it; it is looked for no further.

        Args:
            frame: The innermost frame of the call.
        """
        kinds, first, depth, library, shards = self._kinds, frame, 0, None, None
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._judge(code)
            if kind == _USERS:
                break
            if library is None and kind == _LIBRARYS:
                library = frame
            elif kind == _SHARDS and shards is None:
                shards = frame
            depth += 1
            frame = frame.f_back
        if frame is None:
            frame = library
        if frame is None:  # a thread of the autograd engine, where nobody's Python is
            key = (id(first.f_code), first.f_lasti, 0, 0, depth)
        else:
            key = (id(first.f_code), first.f_lasti, id(frame.f_code), frame.f_lasti, depth)
        found = self._found.get(key) or self._describe(key, first, frame)
        return (*found, 0 if shards is None else self.number(self.modules.find_shards(shards)))

    def number(self, module: str) -> int:
        """Return the number of a module's name."""
        number = self._numbers.get(module)
        if number is None:
            if len(self._numbers) >= _MOST_MODULES:
                return 0
            number = self._numbers[module] = self._intern(module)
        return number

    def find_line(self, frame: Any) -> str:
        """Return ``file.py:LINE`` of the innermost frame of the user's own code; empty if there is none."""
        while frame is not None and self._judge_file(frame.f_code.co_filename) != _USERS:
            frame = frame.f_back
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def describe(self, frames: list[dict[str, Any]]) -> tuple[str, list[str]]:
        """Return line and functions from frames as the flight recorder has them, innermost first."""
        inside: list[str] = []
        library = ""
        for frame in frames:
            kind = self._judge_file(frame["filename"])
            if kind == _USERS:
                return f"{frame['filename']}:{frame['line']}", _shorten(inside)
            if kind == _TORCHS:
                _add(inside, frame["name"])
            elif not library:
                library = f"{frame['filename']}:{frame['line']}"
        return library, _shorten(inside)

    def _describe(self, key: tuple[int, ...], first: Any, last: Any) -> tuple[int, int, bool]:
        inside: list[str] = []
        called = None
        frame = first
        while frame is not None and frame is not last:
            if self._kinds.get(id(frame.f_code)) in (_TORCHS, _SHARDS):
                _add(inside, frame.f_code.co_name)
            elif self._is_rankwises(frame.f_code.co_filename):
                called = frame
            frame = frame.f_back
        if not inside and called is not None:
            inside = [_name_call(called, self._rankwise)]  # no function of torch's is between: it is rankwise's own
        site = "" if last is None else f"{last.f_code.co_filename}:{last.f_lineno}"
        blocks = not {"send", "recv"}.isdisjoint(inside[:_MOST_INNER])
        numbers = self._intern(site), self._intern(">".join(_shorten(inside))), blocks
        if len(self._found) < _MOST_KEPT:
            self._found[key] = numbers
        return numbers

    def _is_rankwises(self, file: str) -> bool:
        """Tell whether code is of rankwise's library: neither of its evidence, nor a decorator of its functions."""
        return file.startswith(self._rankwise) and not file.startswith(self._ours) and not file.endswith(_DECORATORS)

    def _judge(self, code: Any) -> int:
        kind = _SHARDS if self._holds_shards(code) else self._judge_file(code.co_filename)
        if len(self._codes) >= _MOST_KEPT:  # code that is made again and again, by exec
            self._kinds, self._found, self._codes = {}, {}, []
        self._codes.append(code)
        self._kinds[id(code)] = kind
        return kind

    def _judge_file(self, file: str) -> int:
        if file.startswith(self._torch):
            return _TORCHS
        is_library = file.startswith(self._library) or file == "<string>" or any(part in file for part in _INSTALLED)
        return _LIBRARYS if is_library else _USERS


def _name_call(frame: Any, folder: str) -> str:
    """Return the name by which users know a function of rankwise: ``rankwise.all_reduce``, ``rankwise.Trainer.fit``."""
    code = frame.f_code
    room = code.co_filename[len(folder) :].partition(os.sep)[0]
    name = getattr(code, "co_qualname", None)  # Python 3.11
    if name is None:
        is_method = code.co_varnames[:1] == ("self",)
        name = f"{type(frame.f_locals['self']).__name__}.{code.co_name}" if is_method else code.co_name
    name = name.partition(".<locals>")[0]
    name = name.removesuffix(".__iter__").removesuffix(".__init__")
    return f"rankwise.{room}.{name}" if room in _ROOMS else f"rankwise.{name}"


def _add(inside: list[str], name: str) -> None:
    if name not in DULL:
        inside.append(name)


def _shorten(inside: list[str]) -> list[str]:
    """Return functions outermost first, and not those in the middle of many: recursion through a model's layers tells nothing."""
    if len(inside) > _MOST_INNER + _MOST_OUTER:
        inside = inside[:_MOST_INNER] + inside[-_MOST_OUTER:]
    return inside[::-1]
