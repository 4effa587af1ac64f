"""The process group is created with arguments or at a place that do not fit."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    INIT,
    called_names,
    once,
    places,
    text_of,
)
from rankwise.lint.analyses.options import text_given
from rankwise.lint.finding import Found
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.script import Script

_STORE = "torch.distributed.FileStore"
_REMOVES = frozenset({"remove", "unlink", "rmtree", "mkdtemp", "TemporaryDirectory", "mkstemp", "NamedTemporaryFile"})


@rule("RW206", "warning", "I13", "all runs share one fixed init file")
def fixed_init_file(script: Script) -> Iterator[Found]:
    if not _REMOVES.isdisjoint(called_names(script.tree)):
        return
    for place in once(places(script, INIT, _STORE)):
        call = place.last
        at = (0, "file_name") if call.name == _STORE else (1, "init_method")
        node, (path, is_default) = call.arg_node(*at), text_given(call.arg(*at))
        if path is None or node is None or (call.name == INIT and not path.startswith("file:")):
            continue
        what = "is the default, so all runs share one file" if is_default else "is the same file for each run"
        shown = repr(path) if isinstance(node, ast.Constant) else f"`{text_of(node)}`"
        yield Found(
            node,
            f"{shown} {what}: one that was killed leaves it behind, and the next hangs; two at once join each other",
            'use "env://" under a launcher, or put the job\'s id into the path',
        )


_UNITS = {
    "days": 86400.0,
    "seconds": 1.0,
    "microseconds": 1e-6,
    "milliseconds": 1e-3,
    "minutes": 60.0,
    "hours": 3600.0,
    "weeks": 604800.0,
}
_SHORT_S, _LONG_S = 30.0, 86400.0


@rule("RW215", "warning", "I20", "the process group's timeout is very short or very long")
def odd_timeout(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT, "accelerate.InitProcessGroupKwargs")):
        call = place.last
        position = 2 if call.name == INIT else None
        value, node = call.arg(position, "timeout"), call.arg_node(position, "timeout")
        seconds = _seconds(value.made) if value is not None and value.made is not None else None
        if seconds is None or node is None:
            continue
        if 0 < seconds < _SHORT_S:
            message = (
                f"`{text_of(node)}` is {seconds:g} s: a rank that loads, saves or compiles for longer ends the job"
            )
            yield Found(node, message, "allow as many minutes as the slowest step may take")
        elif seconds > _LONG_S:
            message = f"`{text_of(node)}` is {seconds / 86400:g} days: a hang is not reported before that"
            yield Found(node, message, "allow as long as the slowest step may take", severity="hint")


def _seconds(call: Call) -> float | None:
    """The length of a timedelta that the script creates for a timeout."""
    if call.name != "datetime.timedelta" or call.has_star:
        return None
    given = dict(zip(_UNITS, call.args, strict=False)) | call.kwargs
    if not given or not all(name in _UNITS and isinstance(one.const, (int, float)) for name, one in given.items()):
        return None
    return sum(_UNITS[name] * float(one.const) for name, one in given.items())
