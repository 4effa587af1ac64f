"""Names the module of a model that a rank makes a collective for: ``layers.3``, as ``named_modules()`` of the outermost one has it.

It is read from frames: those in which torch calls a module, and those of FSDP2 that gather or reduce what a module has. No hook, so
a forward costs what it did. This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CALLS, _CALL = f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py", "_wrapped_call_impl"
_SHARDS = f"{os.sep}_fully_shard{os.sep}_fsdp_param_group.py"
#: Wrappers that put a part of their own into names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_REPLICAS = "DistributedDataParallel"
#: Of the outermost module itself, as its own name is empty.
ROOT = "."


def holds_shards(code: Any) -> bool:
    """Tell whether code is a method of FSDP2 that knows whose parameters it gathers, or whose gradients it reduces."""
    return bool(code.co_filename.endswith(_SHARDS) and code.co_varnames[:1] == ("self",))


class ModuleNames:
    """The names of this process's modules, found when they are asked for."""

    def __init__(self) -> None:
        self._of_shards: Any = weakref.WeakKeyDictionary()
        self._root: Any = lambda: None
        self._names: dict[int, str] = {}

    def find(self, frame: Any) -> str:
        """Return the name of the innermost module that runs, or whose shards are on their way; empty if that is the outermost, or none is there."""
        return self._find(_list_outwards(frame))

    def find_raised(self, trace: Any) -> str:
        """Return the same for where an exception was raised."""
        frames = []
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        return self._find(reversed(frames))

    def _find(self, frames: Iterable[Any]) -> str:
        innermost = outermost = None
        for frame in frames:
            if _calls_module(frame.f_code):
                outermost = frame.f_locals.get("self")
                innermost = outermost if innermost is None else innermost
            elif innermost is None and holds_shards(frame.f_code) and (name := self.find_shards(frame)):
                return name
        name = "" if innermost is None else self._find_name(outermost, innermost)
        return "" if name == ROOT else name

    def find_shards(self, frame: Any) -> str:
        """Return the name of the module whose shards a frame of FSDP2 is about; empty if it is not known yet.

        Args:
            frame: One of which ``holds_shards`` is true.
        """
        shards = frame.f_locals.get("self")
        known = self._of_shards.get(shards)
        if known is not None:
            return str(known)
        found = getattr(shards, "_module_fqn", None)
        if found is None:
            return ""
        # The root of FSDP has no name of its own; it may stand inside of another module.
        name = _clean(found) if found else self._find_outer(frame, next(iter(shards.modules), None))
        if name:
            self._of_shards[shards] = name
        return name

    def _find_outer(self, frame: Any, module: Any) -> str:
        called = [one.f_locals.get("self") for one in _list_outwards(frame) if _calls_module(one.f_code)]
        return self._find_name(called[-1], module) if called else ""

    def _find_name(self, root: Any, module: Any) -> str:
        if self._root() is not root or id(module) not in self._names:
            self._names = {id(one): name for name, one in root.named_modules()}
            self._root = weakref.ref(root)
        name = self._names.get(id(module))
        if name is None:
            return ""
        is_replica = type(root).__name__ == _REPLICAS
        return _clean(name.removeprefix("module").removeprefix(".") if is_replica else name) or ROOT


def _calls_module(code: Any) -> bool:
    return bool(code.co_name == _CALL and code.co_filename.endswith(_CALLS))


def _list_outwards(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
