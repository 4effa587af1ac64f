"""Collectives in a compiled function: torch.compile leaves them out of its graphs, and they run as they do elsewhere."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType

_P = ParamSpec("_P")
_T = TypeVar("_T")
_REASON = "the collectives of rankwise run outside of compiled graphs"
#: The code of all functions that a compiled caller calls.
_around: set[CodeType] = set()


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep Dynamo out of a function: it would trace into the process group, and fail there.

    ``torch.compiler.disable`` does that, and imports Dynamo, which takes a second. So it is asked only where somebody
    else has imported it.

    Args:
        function: What to call as it is.
    """
    disabled: list[Callable[_P, _T]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(function, reason=_REASON))
            _spare(dynamo)
        return disabled[0](*args, **kwargs)

    return outside_graphs(call)


def _spare(dynamo: ModuleType) -> None:
    """Keep Dynamo from the frames around what it was disabled for: it would compile them anew for all kinds of arguments."""
    skip = getattr(dynamo.eval_frame, "skip_code", None)
    if skip is not None:
        for code in _around:
            skip(code)


def is_called_compiled() -> bool:
    """Whether the caller runs inside a compiled function: its frames then hold references as no plain one does."""
    if "torch._dynamo" not in sys.modules:
        return False
    eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    find = getattr(eval_frame, "get_eval_frame_callback", None)
    return find is None or callable(find())


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a compiled caller leave its graph before it calls; unlike ``eager``, without a frame that holds the arguments.

    Args:
        function: What passes its arguments on to a function that is ``eager``, once it has looked who holds them.
    """
    _around.add(function.__code__)
    # Read by Dynamo.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function
