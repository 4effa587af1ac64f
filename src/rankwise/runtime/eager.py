"""Collectives in a compiled function: torch.compile leaves them out of its graphs, and they run as they do elsewhere."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    return outside_graphs(call)


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a compiled caller leave its graph before it calls; what an ``eager`` one holds is not counted here.

    Args:
        function: What passes its arguments on to a function that is ``eager``, once it has looked who holds them.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # read by Dynamo
    return function
