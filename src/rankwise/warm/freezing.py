"""Keeping the garbage collector, and the end of the process, off what the ranks share, without a rank's exit showing it.

A collection writes to every object that it looks at, and so would copy the server's memory into each rank.
`gc.freeze` takes what is loaded out of its reach, at the interpreter's exit too, which saves most of its time:
unfreezing all would cost three times as much (0.3 to 0.9 s of CPU a rank with torch._dynamo). But what is frozen is
never taken apart, and two kinds of objects must be: the script's own, and those that their library counts at exit.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import _ctypes
import atexit
import contextlib
import ctypes
import functools
import gc
import os
import sys
import weakref
from typing import Any

#: Libraries whose classes go when only these, and what belongs to them, are left to the collector.
_KNOWN = ("triton", "nanobind")
#: What torch's import brings; its plug-ins for other devices, which it imports too, lie elsewhere.
_TORCHS = ("torch", "functorch", "numpy", "triton", "nvidia", "cuda")
#: Folders that packages of others have parts in, too (nvidia.dali).
_SHARED = ("nvidia", "cuda")
#: Whose modules are left whole at exit; not ``torch.distributed``'s, which hold a script's process groups.
_LEFT_WHOLE = {"torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "networkx"}
#: Libraries in each process, or what is compiled in, may write at the very end what they have measured.
_INSTRUMENTS = ("LD_PRELOAD", "LD_AUDIT", "INTEL_LIBITTNOTIFY64", "LLVM_PROFILE_FILE", "GCOV_PREFIX")
#: A free-threaded interpreter has no lists of what it collects: nothing can be taken out of what is frozen.
_HAS_LISTS = "t" not in getattr(sys, "abiflags", "")
#: Called behind all functions of atexit, also those of modules that the warm server has imported.
_LAST: list[Any] = []


@atexit.register
def _end() -> None:
    for end in _LAST:
        end()


def freeze(libraries: set[str]) -> None:
    """Keep the collector off all objects that are loaded, but for those that must be taken apart at exit; and the exit off torch's C++ and modules.

    Args:
        libraries: Those that came with torch.
    """
    counted, old = _find_nanobind_objects(), sys.modules["__main__"]
    # Modules have imported it (dill, for one), it may have a second name, and garbage has copies of the table of
    # modules (58, from inspect, after an import of torch._dynamo). Frozen objects can't be asked.
    holders: list[Any] = [holder for holder in gc.get_referrers(old) if type(holder) is dict]
    gc.freeze()
    _thaw(counted)
    # What a frozen object holds is never collected: cycles of the script's own objects would not be taken apart at
    # exit, and their ``__del__`` not run. So the script gets another ``__main__``.
    new = type(old)("__main__")
    vars(new).clear()
    vars(new).update(vars(old))
    if "__annotations__" in vars(old):
        vars(new)["__annotations__"] = {}
    namespaces = [names for names in holders if "__name__" in names]
    # Garbage would keep these alive past their time: at exit the order counts in which modules let go of the script's.
    dropped_ids = {id(old), *(id(sys.modules.get(names["__name__"])) for names in namespaces)} - {id(None)}
    for names in holders:
        if names is sys.modules or "__name__" in names:
            names.update({name: new for name, value in names.items() if value is old})
        else:
            for name in [name for name, value in names.items() if id(value) in dropped_ids]:
                del names[name]
    probe = object()
    is_held = sys.getrefcount(old) > sys.getrefcount(probe)
    # Of another library's classes, instances may be held by classes of Python that stay frozen.
    is_unknown = any(isinstance(one, type) and not str(one.__module__).startswith(_KNOWN) for one in counted)
    if is_held or is_unknown or not _HAS_LISTS:
        atexit.register(gc.unfreeze)
    _leave_operators()
    _LAST.append(_KeepModules())
    if not any(map(os.environ.get, _INSTRUMENTS)) and not os.path.exists("/etc/ld.so.preload"):
        atexit.register(_leave_out_destructors, _find_torchs(libraries))


def _leave_out_destructors(known: tuple[str, ...]) -> None:
    """Have a rank end when its interpreter has: to take the C++ of torch apart costs 0.1 s of CPU, and a copy of the server's memory.

    Not where that may show: libraries of the script's own may write something at the very end, and torch tells of
        collectives that nobody waited for.
    """
    libc: Any = ctypes.CDLL(None)
    pythons = os.path.dirname(getattr(_ctypes, "__file__", ""))
    own = [one for one in list_libraries() if os.path.dirname(one) != pythons and not one.startswith(known)]
    count_open = getattr(sys.modules.get("torch._C._distributed_c10d"), "_get_work_registry_size", int)
    if hasattr(libc, "on_exit") and "" not in known and not own and not count_open():
        libc.on_exit(libc._exit, None)
        # The last to come is the first to be called; fflush would wait for a thread that reads.
        libc["__cxa_atexit"](libc.fcloseall, None, None)


def _leave_operators() -> None:
    """Have torch not take its own operators from its dispatcher at exit, one by one."""
    for one in [*vars(weakref.finalize).get("_registry", ())]:
        alive = one.peek()
        if alive is not None and getattr(alive[1], "__module__", None) == "torch.library":
            one.atexit = False


class _ModuleStandIn:
    """Stands for a module in ``sys.modules``: what is no module is not taken apart at exit."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _KeepModules:
    """Has the exit leave torch's modules as they are: to let go of all that is in them copies the server's memory, and takes half of the CPU time of an exit.

    A module in which a script has put something, or into a list or table there, goes as it would elsewhere.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, Any, list[_Contents], _ModuleStandIn]] = []
        for name, module in [*sys.modules.items()]:
            is_torchs = name.partition(".")[0] in _LEFT_WHOLE and not f"{name}.".startswith("torch.distributed.")
            if is_torchs and type(module) is type(sys) and _can_tell_changes():
                held = [one for one in vars(module).values() if type(one) in _LAYOUTS]
                contents = [_Contents([vars(module)]), *([_Contents(held)] if held else [])]
                self._kept.append((name, module, contents, _ModuleStandIn(module)))

    def __call__(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
        for name, module, contents, stand_in in self._kept:
            # The module's own names come first: only while these are the same is there still what they stood for.
            if sys.modules.get(name) is module and all(one.are_unchanged() for one in contents):
                sys.modules[name] = stand_in  # type: ignore[assignment]


class _Contents:
    """What dicts, lists and sets hold, seen in their memory: to ask the objects in them would copy their pages."""

    def __init__(self, holders: list[Any]) -> None:
        self._heads = [(id(holder) + 16, _LAYOUTS[type(holder)][0]) for holder in holders]
        self._seen = _read(self._heads)
        self._tables = [table for table in map(_find_entries, holders) if table[1] > 0]
        self._entries = _read(self._tables)

    def are_unchanged(self) -> bool:
        # A table that has moved shows in the head of its holder; only one that has not is read.
        return _read(self._heads) == self._seen and _read(self._tables) == self._entries


#: Of each kind: bytes of its head, behind its count of references and its type; and where in there the address of its entries stands.
_LAYOUTS: dict[type, tuple[int, int]] = {dict: (32, 16), list: (24, 8), set: (32, 24)}
#: In front of a dict's entries: sizes, and what changes when they are read.
_HEADER_BYTES = 32
#: Up to Python 3.12 a dict's head has a number that each change renews.
_HAS_VERSIONS = sys.version_info < (3, 13)


def _find_entries(holder: Any) -> tuple[int, int]:
    """Return where a holder's entries lie, and how many bytes they take."""
    size, at = _LAYOUTS[type(holder)]
    head = ctypes.string_at(id(holder) + 16, size)
    table = int.from_bytes(head[at : at + 8], sys.byteorder)
    if type(holder) is list:
        return table, 8 * len(holder)
    if type(holder) is set:
        return table, 16 * (1 + int.from_bytes(head[16:24], sys.byteorder))
    num_bytes = 0 if _HAS_VERSIONS else holder.__sizeof__() - dict.__basicsize__ - _HEADER_BYTES
    return table + _HEADER_BYTES, num_bytes


def _read(regions: list[tuple[int, int]]) -> bytes:
    read = ctypes.string_at
    return b"".join([read(address, size) for address, size in regions])


@functools.cache
def _can_tell_changes() -> bool:
    """Try it: another Python may lay out its objects in another way."""
    if not _HAS_LISTS or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    trials: tuple[tuple[Any, list[Any]], ...] = (
        ({"a": 1, "b": 2}, [lambda one: one.update(a=3), lambda one: one.update(c=3), lambda one: one.pop("b")]),
        (vars(type(sys)("tried", "doc")), [lambda one: one.update(__doc__=1), lambda one: one.update(c=3)]),
        ([1, 2], [lambda one: one.append(3), lambda one: one.__setitem__(0, 4)]),
        ({1, 2}, [lambda one: one.add(3), lambda one: one.discard(1)]),
    )
    for holder, changes in trials:
        for change in changes:
            contents = _Contents([holder])
            is_seen = contents.are_unchanged()
            change(holder)
            if not is_seen or contents.are_unchanged():
                return False
    return True


def _find_torchs(libraries: set[str]) -> tuple[str, ...]:
    """Return the folders of torch's packages, which may load more later (numpy.random), and the system's libraries; none of another package."""
    found, folders = set(), [os.path.realpath(folder) for folder in sys.path if folder]
    for library in libraries:
        inside = [library[len(folder) + 1 :] for folder in folders if library.startswith(f"{folder}/")]
        parts = min(inside, key=len, default="").split("/")
        if not parts[0] or parts[0].partition(".")[0] in _TORCHS:
            rest = "/".join(parts[2 if parts[0] in _SHARED else 1 :])
            found.add(library.removesuffix(rest))
    return tuple(found)


def list_libraries() -> set[str]:
    """Return the files that the process has code of, and "" where the system does not show them."""
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as maps:
        return {line[line.index("/") :].rstrip() for line in maps if "x" in line.split(None, 2)[1] and "/" in line}
    return {""}


def _find_nanobind_objects() -> list[Any]:
    """Return the classes that nanobind has made (triton 3.9 has 64), and what belongs to them.

    It counts its objects, and complains at exit of those that are left, on standard error: an instance that is a
    function's default value, say, is let go only when its class is. These are cycles without anything else in them.
    """
    if not _HAS_LISTS:
        return []
    found: dict[int, Any] = {}
    todo: list[Any] = [one for one in type.__subclasses__(object) if _is_nanobinds(one)]
    while todo:
        one = todo.pop()
        if id(one) in found or not gc.is_tracked(one):
            continue
        found[id(one)] = one
        referents = gc.get_referents(one) if _is_nanobinds(one) or type(one) is property else ()
        todo += [part for part in referents if _is_nanobinds(part) or _is_nanobinds(type(part))]
        if isinstance(one, type) and _is_nanobinds(one):
            todo += type.__subclasses__(one)
            for part in referents:
                if type(part) in {dict, tuple}:
                    todo += [part, *(part.values() if type(part) is dict else ())]
    return list(found.values())


def _is_nanobinds(one: object) -> bool:
    """Tell whether a class or a function is of nanobind's making, whichever copy of it made that."""
    module = "" if type(one) is type else vars(type(one)).get("__module__")
    return isinstance(module, str) and module.partition(".")[0] == "nanobind"


def _thaw(objects: list[Any]) -> None:
    """Let the collector see some of the frozen objects again, as if they had just been made."""
    untrack, track = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
    untrack.argtypes = track.argtypes = [ctypes.py_object]
    untrack.restype = track.restype = None
    for one in objects:
        untrack(one)
        track(one)
