"""What a resident server has loaded, and whether it has changed on disk since.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    Stamp = tuple[int, int, int, int]

_ABSENT = (0, 0, 0, 0)
#: No file has this stamp.
_NEVER = (-1, -1, -1, -1)
#: The clock that file systems stamp by goes in steps.
_STEP_S = 0.02


class Loaded:
    """The files that this process was made of, with their stamps.

    Args:
        list_importable: Gives name and path of the modules in a folder that have one of some names.

    Attributes:
        begin_s: When this process began, as time.time() has it.
    """

    def __init__(self, list_importable: Callable[[str, Container[str]], Iterable[tuple[str, str]]]) -> None:
        self._list_importable = list_importable
        self.begin_s = time.time() - _measure_age_s()
        self._stamps: dict[str, Stamp] = {}
        # With each folder's stamp what matters there: all that is installed; or, where users write, what hides a loaded
        # module.
        self._folders: dict[str, tuple[Stamp, frozenset[str]]] = {}
        self._site_folders = frozenset(_list_site_folders())
        # Taken now: a part of it may be relative to the folder that this process was started in.
        entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        self._user_folders = [os.path.abspath(entry) for entry in entries]
        self._tops: frozenset[str] = frozenset()
        self._known_folders = frozenset(sys.path)

    def note(self, path: str) -> None:
        """Keep the stamp of a file or folder, whether it is there or not."""
        if path not in self._stamps:
            stamp = _stamp(path)
            # What was written while this process imports may be newer than what it has loaded: then it is changed
            # already.
            is_new = stamp[0] >= (self.begin_s - _STEP_S) * 1e9 or path.endswith(" (deleted)")
            self._stamps[path] = _NEVER if is_new else stamp

    def note_module(self, module: Any) -> None:
        """Keep the stamp of a module's file."""
        for path in (
            getattr(module, "__file__", None),
            getattr(getattr(module, "__spec__", None), "origin", None),
        ):
            if isinstance(path, str) and os.path.isabs(path) and not self._has_written(path):
                self.note(path)

    def _has_written(self, path: str) -> bool:
        """Tell whether this process has itself written a module, as torch up to 2.8 does from templates: into a new temporary folder, which the first rank that exits removes."""
        folder = os.path.dirname(path)
        is_temporary = os.path.realpath(os.path.dirname(folder)) == os.path.realpath(tempfile.gettempdir())
        return is_temporary and folder not in self._known_folders and _stamp(path)[0] >= self.begin_s * 1e9

    def note_all(self, modules: Iterable[Any]) -> None:
        """Keep the stamps of all that this process has loaded, and of what decided what it loads."""
        for module in list(modules):
            self.note_module(module)
        for path in (*_list_mapped(), sys.executable, os.path.join(sys.prefix, "pyvenv.cfg")):
            self.note(path)
        self._tops = frozenset({"sitecustomize", "usercustomize", *(name.partition(".")[0] for name in sys.modules)})
        for path in sys.path:
            self.note(os.path.join(path, "sitecustomize.py"))
        for folder in (*self._site_folders, *self._user_folders):
            names = self._list(folder)
            self._folders.setdefault(folder, (_stamp(folder), names))
            for name in names if folder in self._site_folders else ():
                if name.endswith(".pth"):
                    self.note(os.path.join(folder, name))

    def find_changed(self) -> str:
        """Return a path that has changed since it was loaded; empty if none has."""
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                return path
        for folder, (before, names) in self._folders.items():
            now = _stamp(folder)
            if now != before:
                if self._list(folder) != names:
                    return folder
                self._folders[folder] = (now, names)
        return ""

    def _list(self, folder: str) -> frozenset[str]:
        if folder not in self._site_folders:
            return frozenset(name for name, _ in self._list_importable(folder, self._tops))
        try:
            return frozenset(os.listdir(folder)) - {"__pycache__"}
        except OSError:
            return frozenset()  # it may be made later


def _measure_age_s() -> float:
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _list_site_folders() -> Iterator[str]:
    site = sys.modules.get("site")
    if site is not None:
        yield from site.getsitepackages()
        if site.ENABLE_USER_SITE:
            yield site.USER_SITE
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            yield path


def _list_mapped() -> Iterator[str]:
    """Give the libraries: a build may renew one of torch's, and leave the module that loads it as it is."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n").split(None, 5)[5:]
            if path and path[0].startswith("/") and ".so" in path[0]:
                yield path[0]


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return _ABSENT
    # An installer may give a file the time that it had in its package; no program can set the time of the inode's
    # change.
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns)
