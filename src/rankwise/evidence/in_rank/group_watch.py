"""In a rank whose script makes and destroys its process groups itself.

Who is absent, doubled or odd is named there too, and nothing waits for this: while torch connects the ranks, a thread
writes this rank into the registry; it speaks only if torch is still waiting long after it could have been through. At the
other end, ``destroy_process_group`` is kept from a deadlock of torch's own. Each file here is loaded by its path.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULE = "torch.distributed.distributed_c10d"
#: Makes the default group and all others; private, so nothing depends on its being there (torch 2.8 to 2.13 have it).
_FUNCTION = "_new_process_group_helper"
#: Called by ``destroy_process_group`` before it lets go of the groups.
_LETTING_GO = ("_unregister_all_process_groups", "_unregister_process_group")
_SETTLE_S = 1.0
#: A rank that is doubled, or of another world, and is stuck for so long will never get through.
_STUCK_S = 5.0
#: After so long the first rank to come says for whom torch waits; it goes on waiting as long as the script lets it.
_NOTICE_S = 60.0
_BRIEF_S = 0.05
_EXPLAIN_S = 2.0
#: What torch's errors say when ranks did not find each other.
_WAITED = ("timeout", "timed out", "wait ", "connect", "store")
#: What is wrong whoever else there may be that has not registered.
_CERTAIN = {"clash", "out of range", "world sizes", "gone", "address", "backends", "device"}


def install(
    load: Callable[[str], Any],
    recorder: Any,
    settle: Callable[[float], None],
    record: Callable[[Any], None] | None,
    *,
    reports_absent: bool,
) -> None:
    """Watch over the process groups that the script makes, now or when it imports torch.distributed.

    Args:
        load: Returns a module of ours by its name.
        recorder: Writes into this rank's notes how it ends.
        settle: Waits, so many seconds at most, until the groups' threads are at rest.
        record: Begins to record this rank's collectives, when given torch.distributed's module; None if nobody wants to
            know.
        reports_absent: Whether absent ranks are reported: not where others may have started some.
    """
    is_off = os.environ.get("RANKWISE_HANDSHAKE") in {"0", "off"}
    watch = _Watch(load, recorder.note) if reports_absent and not is_off else None

    def wrap(module: Any) -> None:
        try:
            wrap_functions(module)
        except Exception as error:  # the user's import matters more than our view of it
            sys.stderr.write(f"rankwise: this rank's process groups are not watched: {error!r}\n")

    def wrap_functions(module: Any) -> None:
        wrappers = load("replace_functions")
        for name in _LETTING_GO:
            # Whoever drops a group last, often a model long after `destroy_process_group`, must not wait for ever.
            wrappers.do_first(module, name, lambda _args: settle(_SETTLE_S))
        if watch is not None:
            watch.wrap(module, wrappers.leave_out_caller)
        if record is not None:
            record(module)

    module = sys.modules.get(_MODULE)
    if module is not None:
        wrap(module)
    else:
        _run_after_import(wrap)


def _run_after_import(wrap: Callable[[Any], None]) -> None:
    """Call ``wrap`` with the one module when it is imported.

    A finder of our own in ``sys.meta_path`` could be seen; so the path finder is asked through us, until that import.
    """
    finder: Any = PathFinder
    original = finder.__dict__["find_spec"]

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = original.__func__(finder, name, path, target)
        if name == _MODULE and spec is not None and spec.loader is not None:
            finder.find_spec = original
            _call_after(spec.loader, wrap)
        return spec

    finder.find_spec = staticmethod(find_spec)


def _call_after(loader: Any, wrap: Callable[[Any], None]) -> None:
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module  # the class's own is seen again
        run(module)
        wrap(module)

    loader.exec_module = exec_module


class _Watch:
    def __init__(self, load: Callable[[str], Any], note: Callable[..., None]) -> None:
        self._load, self._note = load, note
        self._num_rendezvous: dict[str, int] = {}
        self._pid = os.getpid()

    def wrap(self, module: Any, leave_out: Callable[[BaseException], None]) -> None:
        original = getattr(module, _FUNCTION, None)
        if original is None:
            return

        import functools  # not before the script's first line, as little is

        @functools.wraps(original)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            stay = self._enter(module, args)
            if stay is not None and stay.number > 1 and stay.all_are_ours():
                # Of the addresses that the groups before have left in the store, torch would take those of dead
                # sockets.
                args = (*args[:4], module.PrefixStore(f"rankwise/again/{stay.number}", args[4]), *args[5:])
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                if stay is not None and isinstance(error, Exception):
                    stay.explain(error)
                leave_out(error)
                raise
            finally:
                if stay is not None:
                    stay.end()

        setattr(module, _FUNCTION, make_group)

    def _enter(self, module: Any, args: tuple[Any, ...]) -> _Stay | None:
        """Begin to watch if this is the group of all ranks, made by the script itself."""
        if len(args) < 5 or args[2] or os.getpid() != self._pid:
            return None
        import threading

        world_size, rank, _, backend, store = args[:5]
        # rankwise.init() makes it in a thread of that name, after a handshake of its own.
        if not isinstance(world_size, int) or world_size < 2 or threading.current_thread().name == "rankwise-deadline":
            return None
        # By name: a process may be in groups of its own that others have no part in.
        name = str(args[5]) if len(args) > 5 else ""
        number = self._num_rendezvous[name] = self._num_rendezvous.get(name, 0) + 1
        place = module.PrefixStore(f"rankwise/watch/{name}/{number}", store)
        return _Stay(
            self._load,
            self._note,
            place,
            number,
            rank=rank,
            world_size=world_size,
            backend=str(backend),
        )


class _Stay:
    """One call of ``init_process_group``, from its begin to its end."""

    def __init__(
        self, load: Callable[[str], Any], note: Callable[..., None], store: Any, number: int, **who: Any
    ) -> None:
        import threading

        self.number = number
        self._load, self._note, self._store, self._who = load, note, store, who
        self._done, self._start = threading.Event(), time.monotonic()
        self._registry: Any = None
        self._thread = threading.Thread(target=self._run, name="rankwise-group-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join(_BRIEF_S)

    def explain(self, error: BaseException) -> None:
        """Say what the registry tells, beside torch's own error: that names keys and addresses, but no ranks."""
        if not any(word in str(error).lower() for word in _WAITED):
            return
        import threading

        lines: list[Any] = []

        def read() -> None:
            try:
                lines.extend(self._judge())
            except Exception:  # the store may be what was lost; torch's error matters, not this one's
                return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(_EXPLAIN_S)
        for problem in lines[:1]:
            self._say(problem)
            if problem["kind"] in _CERTAIN - {"gone"}:
                self._note_problem(problem)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # the script's own error matters, not that of a watcher
            return

    def _watch(self) -> None:
        module = self._load("rendezvous_registry")
        self._module = module
        record = module.describe_process(
            loopback=module.find_loopback(os.environ.get("GLOO_SOCKET_IFNAME", "")), **self._who
        )
        # Its own connection: while torch waits in one, nobody else gets a word in.
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._registry = module.RendezvousRegistry(store, record)
        for problem in self._registry.enter():
            if "local_ranks" in problem:
                # Whoever comes last sees it; torch may connect the first two all the same, and the others lose them
                # later.
                self._note_problem(problem)
        while not self._done.wait(_STUCK_S) and time.monotonic() - self._start < _NOTICE_S:
            if self._registry.is_contested:
                self._give_up(self._judge())
        if self._done.is_set():
            return
        problems = self._judge()
        if problems and problems[0]["kind"] == "absent" and self._registry.seat == 1:
            self._say(problems[0])

    def _judge(self) -> list[dict[str, str]]:
        if self._registry is None or not self._registry.seat:
            return []
        found = self._module.judge(self._registry.read(), time.monotonic() - self._start)
        # Only where this launcher has started all of them, each with a hook, is a rank that is not in the registry
        # absent.
        result = _CERTAIN | ({"absent"} if self.all_are_ours() else set())
        return [problem for problem in found if problem["kind"] in result]

    def all_are_ours(self) -> bool:
        """Whether this launcher has started all ranks of the group."""
        mine = {
            "RANK": self._who["rank"],
            "WORLD_SIZE": self._who["world_size"],
            "LOCAL_WORLD_SIZE": self._who["world_size"],
        }
        return all(os.environ.get(name) == str(value) for name, value in mine.items())

    def _note_problem(self, problem: dict[str, str]) -> None:
        """Write it into the notes, for the verdict on a job that ends in lost peers and timeouts."""
        local_ranks = [int(one) for one in problem.get("local_ranks", "").split()]
        self._note("problem", text=problem["text"], fix=problem["hint"], local_ranks=local_ranks)

    def _say(self, problem: dict[str, str]) -> None:
        sys.stderr.write(f"rankwise: [rank {self._who['rank']}] {problem['text']}\n  -> {problem['hint']}\n")
        sys.stderr.flush()

    def _give_up(self, problems: list[dict[str, str]]) -> None:
        """End a rank that can't get through: torch would wait for half an hour, and can't be interrupted."""
        if not problems or self._done.is_set():
            return
        self._say(problems[0])
        if "local_ranks" in problems[0]:
            self._note_problem(problems[0])
        import threading
        import traceback

        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = traceback.extract_stack(frame)
        own = [entry for entry in stack if "site-packages" not in entry.filename and not entry.filename.startswith("<")]
        own = [entry for entry in own if os.path.dirname(entry.filename) != os.path.dirname(__file__)]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else None
        text = f"rankwise.HandshakeError: {problems[0]['text']}"
        shown = "Traceback (most recent call last):\n" + "".join(traceback.format_list(stack)) + text + "\n"
        for stream in (sys.stdout, sys.stderr):
            flusher = threading.Thread(target=stream.flush, daemon=True)
            flusher.start()
            flusher.join(_EXPLAIN_S)
        self._note(
            "exception",
            type="rankwise.HandshakeError",
            message=f"{text}\n  -> {problems[0]['hint']}",
            traceback=shown,
            where=where,
        )
        os._exit(1)
