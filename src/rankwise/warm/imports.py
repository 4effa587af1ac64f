"""What a warm server imports for its ranks, and what makes that another thing than a script's own imports would be.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What packages that a user may preload read when they are imported.
_FRAMEWORKS = (
    "HF_",
    "TRANSFORMERS_",
    "HUGGINGFACE_",
    "DATASETS_",
    "WANDB_",
    "TOKENIZERS_",
    "ACCELERATE_",
    "TRL_",
    "DS_",
)
#: What each rank has its own of; there is none in the server.
_RANKS_OWN = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    }
)


class Imports:
    """The modules that are loaded here, and the variables that were read meanwhile.

    Args:
        orders: The server's; see ``serve`` there.
        known: Modules that had been loaded before any of ours.
        say: Tells the supervisor.
        cold: Raised where ranks must not be forked from here.
        load: Gives another module of this folder.

    Attributes:
        first_path: The folder that the script will have in front of its sys.path, or null.
    """

    def __init__(
        self,
        orders: dict[str, Any],
        known: frozenset[str],
        say: Callable[[dict[str, Any]], None],
        cold: type[Exception],
        load: Callable[[str], Any],
    ) -> None:
        self._orders, self._known, self._say, self._cold = orders, known, say, cold
        self.first_path: str | None = orders["first_path"]
        self._checks, self._become_rank = load("checks"), load("become_rank")
        self._thread_owners: list[str] = []
        self._sources: dict[str, int] = {}
        self._rank_readers: dict[str, str] = {}
        self._asked_for: set[str] = set()
        self._reads = self._become_rank.ReadVariables()
        self._read_by_torch: frozenset[str] = frozenset()
        self._shadowed = ""
        self._tops: set[str] = set()
        self._begin_env = dict(os.environ)

    def import_torch(self) -> None:
        """Import what the script will need of torch's."""
        there = frozenset(os.environ)
        with self._noting(self._reads.note):
            for name in self._orders["torch"]:
                self._import(name, must=name == "torch")
        self._read_by_torch = self._reads.list_by_name(there)

    def import_asked(self) -> None:
        """Import what the user named, as the script itself would find it."""
        first = self.first_path
        before = frozenset(sys.modules)
        if first is not None:
            sys.path.insert(0, first)
        try:
            with self._noting(self._note_asked):
                for name in self._orders["asked"]:
                    self._import(name, asked=True)
                for module, name in self._orders["wanted"]:
                    self._import(module, part=name)
        finally:
            if first is not None and first in sys.path:
                sys.path.remove(first)
        if first is None or not self._orders["asked"]:
            return
        # The user's own code may be edited between two attempts; what is installed is not.
        for name in frozenset(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(os.path.join(first, "")) and "site-packages" not in file:
                self._sources[file] = os.stat(file).st_mtime_ns

    def import_more(self, names: list[str]) -> None:
        """Import more of torch's modules; it may be that these hide one of the script's."""
        for name in names:
            self._import(name)
        self.note_loaded()
        self._shadowed = self.find_shadowed()

    def _import(self, name: str, *, part: str = "", must: bool = False, asked: bool = False) -> None:
        threads = self._checks.count_threads()
        try:
            # As the statement does it: a part may be a module, or be loaded when it is asked for.
            module = __import__(name, fromlist=[part] if part else [])
            if part and part != "*":
                getattr(module, part, None)
        except BaseException as error:  # a module may even call sys.exit
            reason = f"import {name}: {_first_line(error)}"
            if must:
                raise self._cold(reason) from None
            if asked:
                self._say({"warning": f"--preload {name}: {_first_line(error)}"})
        if self._checks.count_threads() > threads:
            self._thread_owners.append(name)

    @contextlib.contextmanager
    def _noting(self, note: Callable[[str], None]) -> Iterator[None]:
        """Tell ``note`` of each variable that is looked up in Python; what C reads, nobody can tell."""
        environ: Any = os.environ
        encodekey = environ.encodekey

        def tell(name: str) -> Any:
            note(name)
            return encodekey(name)

        environ.encodekey = tell
        try:
            yield
        finally:
            environ.encodekey = encodekey

    def _note_asked(self, name: str) -> None:
        self._asked_for.add(name)
        if name in _RANKS_OWN:
            self._rank_readers.setdefault(self._become_rank.find_reader().f_globals.get("__name__"), name)

    def check(self) -> None:
        """Look at what is imported.

        Raises:
            Cold: A fork would not be as good as a new process.
        """
        for module, name in self._rank_readers.items():
            if not self._become_rank.is_mended(module):
                raise self._cold(f"{module} asks for {name} when it is imported, but a preload has none")
        self.note_loaded()
        if shadowed := self.find_shadowed():
            raise self._cold(shadowed)

    def note_loaded(self) -> None:
        """Note the packages that were loaded here: to go through all modules in each fork would copy many pages of memory."""
        self._tops = {name.partition(".")[0] for name in sys.modules if name not in self._known}

    def find_shadowed(self) -> str:
        """Tell which module of ours the script's folder has under the same name: the script would get that one."""
        first = self.first_path
        if first is None:
            return ""
        from_there = {os.path.realpath(file) for file in self._sources}
        for _, path in sorted(self._checks.list_importable(first, self._tops)):
            if os.path.realpath(path) not in from_there:
                return f"{path} has the name of a module that is already loaded"
        return ""

    def find_obstacle(self) -> str:
        """Tell why no rank can be forked off this process now; empty if one can."""
        owners = ", ".join(self._thread_owners) or "an import"
        return self._checks.find_thread_or_device(owners) or self._shadowed or self._find_edited()

    def _find_edited(self) -> str:
        for file, time_ns in self._sources.items():
            try:
                if os.stat(file).st_mtime_ns != time_ns:
                    return f"{file} was edited after it was preloaded"
            except OSError:
                return f"{file} was removed after it was preloaded"
        return ""

    def find_other_variable(self, env: dict[str, str]) -> str:
        """Tell in which variable an environment differs that was read at an import; empty if in none."""
        names = (self._read_by_torch | self._asked_for) - _RANKS_OWN
        other = next((name for name in sorted(names) if self._begin_env.get(name) != env.get(name)), None)
        return f"{other} was different when torch was imported" if other else ""

    def list_set(self) -> dict[str, str]:
        """Return the variables that imports have set, which they would in a process that imports for itself."""
        return {name: value for name, value in os.environ.items() if self._begin_env.get(name) != value}

    # ------------------------------------------------------------ in a rank

    def mend(self) -> None:
        """Give this rank what modules have asked for at their import, and each rank has its own of."""
        for module, name in self._rank_readers.items():
            self._become_rank.mend(module, name)

    def list_read(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """Return the variables that torch has read, and those, by name or prefix, that what the user named has."""
        # Names are taken as they are; prefixes are for packages that go through the whole environment.
        asked = (*(self._asked_for - _RANKS_OWN), *_FRAMEWORKS) if self._orders["asked"] else ()
        return self._read_by_torch - _RANKS_OWN, asked


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
