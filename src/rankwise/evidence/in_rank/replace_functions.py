"""Functions of ours in the place of torch's, in a rank: as like them as can be, for the script, for C++ and for torch.compile.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def do_first(module: Any, name: str, action: Callable[[tuple[Any, ...]], None]) -> None:
    """Have an action done before each call of a module's function, with the call's arguments; where there is such a function."""
    original = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        action(args)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            leave_out_caller(error)
            raise

    setattr(module, name, call)


def leave_out_caller(error: BaseException) -> None:
    """Take the frame that has caught an error out of its traceback, so that the user does not read of us; then it is raised again.

    Python 3.10 keeps the traceback beside the error, and shows that frame all the same.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


def imitate(function: Any, name: str, raw: Any) -> Any:
    """Give a wrapper the name of what it wraps; in its code too.

    By that name C++ sees, for a class of Python's that has no such method of its own, that the call comes from here,
    and does not come back here.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    function.__name__ = name
    for attribute in ("__qualname__", "__module__", "__doc__"):
        value = getattr(raw, attribute, None)
        if isinstance(value, str):
            setattr(function, attribute, value)
    function.__wrapped__ = raw
    function._torchdynamo_disable = True
    hide_from_compiler(function, with_callees=False)
    return function


def hide_from_compiler(*functions: Any, with_callees: bool = True) -> None:
    """Let torch.compile leave functions alone, as it does those of C++, when code that it has compiled comes to call them.

    By torch's private means, as the public ones import the compiler; nothing happens where they are other ones.

    Args:
        *functions: Functions or methods.
        with_callees: Whether what they call is left alone too.
    """
    try:
        eval_frame: Any = import_module("torch._C._dynamo.eval_frame")
        action = eval_frame._FrameAction
        how = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
        for function in functions:
            eval_frame.set_code_exec_strategy(function.__code__, how)
    except (ImportError, AttributeError):
        return


def note_after(original: Any, note: Any) -> Any:
    """Return a method that tells of each call that went well: the object, and the caller's frame."""

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            leave_out_caller(error)
            raise
        try:
            note(self, sys._getframe(1))
        except Exception:
            return

    return construct


def note_before(original: Any, note: Any, is_compiling: Any) -> Any:
    """Return a method without arguments that tells of each call before it, by the object's id."""

    @functools.wraps(original)
    def no_sync(self: Any) -> Any:
        if not is_compiling():
            note(id(self))
        return original(self)

    return no_sync


def make_step_hooks(before_step: Any, step: Any, is_compiling: Any) -> tuple[Any, Any]:
    """Return hooks of all optimizers: one for before a step, one for after it."""

    # No names of this module: torch.compile would have to import it, and takes the first branch.
    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            before_step(optimizer)

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            step(optimizer)

    return before, after
