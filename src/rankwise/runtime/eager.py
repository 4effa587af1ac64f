"""Collectives in a compiled function: torch.compile leaves them out of its graphs, and they run as they do elsewhere."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

_P = ParamSpec("_P")
_T = TypeVar("_T")
_REASON = "the collectives of rankwise run outside of compiled graphs"


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
        return disabled[0](*args, **kwargs)

    return outside_graphs(call)


def _skip(code: CodeType) -> None:
    """Keep Dynamo from a frame that a caller outside of its graphs enters: it would compile it anew for all kinds of arguments.

    As ``torch._dynamo.eval_frame.skip_code`` does, without the import of Dynamo.
    """
    dynamo: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    with suppress(AttributeError, TypeError):  # of no use but for speed, and private
        actions = dynamo._FrameAction
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(actions.SKIP, actions.DEFAULT))


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a compiled caller leave its graph before it calls; unlike ``eager``, without a frame that holds the arguments.

    Args:
        function: What passes its arguments on to a function that is ``eager``, once it has looked who holds them.
    """
    _skip(function.__code__)
    # Read by Dynamo.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


@outside_graphs
def is_called_compiled() -> bool:
    """Whether the caller runs inside a compiled function: its frames then hold references as no plain one does."""
    if "torch._dynamo" not in sys.modules:
        return False
    eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    find = getattr(eval_frame, "get_eval_frame_callback", None)
    return find is None or callable(find())
