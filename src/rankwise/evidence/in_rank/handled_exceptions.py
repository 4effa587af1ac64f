"""Which exceptions the threads of a rank are handling just now: one that raised may hang in its `finally`, and its traceback is never printed.

Nothing of the script is run to describe them, as an exception's own text could wait for other ranks. This file stands alone,
as ``rank_exit.py`` does.
"""

from __future__ import annotations

import sys
from typing import Any

_MOST_FRAMES, _MOST_WALKED = 30, 1000
_MOST_LETTERS, _MOST_PARTS, _MOST_BITS = 500, 8, 256
_PLAIN = (str, int, float, bool, bytes, type(None))


def list_handled() -> dict[int, dict[str, Any]]:
    """Return by the thread's identity what it is handling: the message, and the lines from which and through which it was raised.

    The lines are innermost last, as in a traceback.
    """
    ask = getattr(sys, "_current_exceptions", None)
    found: dict[int, dict[str, Any]] = {}
    for ident, entry in (ask() if ask is not None else {}).items():
        error = entry[1] if isinstance(entry, tuple) else entry  # a triple up to Python 3.11
        if isinstance(error, BaseException):
            found[ident] = {"message": _describe(error), "frames": _list_frames(error)}
    return found


def _describe(error: BaseException) -> str:
    """Return ``KeyError: 'x'``, from arguments of plain types alone."""
    kind = type(error)
    module, name = (type.__getattribute__(kind, word) for word in ("__module__", "__qualname__"))
    shown = f"{name}" if module in ("builtins", "__main__") else f"{module}.{name}"
    # The field itself: a class of the script's may have another in front of it.
    args = BaseException.__dict__["args"].__get__(error)
    if not args:
        return shown[:_MOST_LETTERS]
    if issubclass(kind, OSError) and len(args) == 2 and [type(arg) for arg in args] == [int, str]:
        text = f"[Errno {args[0]}] {args[1]}"
    elif len(args) == 1 and type(args[0]) is str and not issubclass(kind, KeyError):
        text = args[0]
    elif len(args) == 1:
        text = _show(args[0])
    else:
        shown_args = [_show(arg) for arg in args[:_MOST_PARTS]]
        text = f"({', '.join(shown_args)}{', …' if len(args) > _MOST_PARTS else ''})"
    return f"{shown}: {text[:_MOST_LETTERS]}"[: 2 * _MOST_LETTERS]


def _show(value: Any) -> str:
    """Return how a value is written, if it is a plain one; of any other only its type."""
    kind = type(value)
    if kind not in _PLAIN or (kind is int and value.bit_length() > _MOST_BITS):
        return f"<{type.__getattribute__(kind, '__qualname__')}>"
    return repr(value[:_MOST_LETTERS] if kind in (str, bytes) else value)


def _list_frames(error: BaseException) -> list[tuple[str, int, str]]:
    frames: list[tuple[str, int, str]] = []
    trace = BaseException.__dict__["__traceback__"].__get__(error)
    while trace is not None and len(frames) < _MOST_WALKED:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    if len(frames) > _MOST_FRAMES:
        frames = frames[: _MOST_FRAMES // 2] + frames[-_MOST_FRAMES // 2 :]
    return frames
