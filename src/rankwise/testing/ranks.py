"""Run a function on several ranks, each a real process, in a twentieth of a second.

The ranks are forked from a server that has imported torch once (multiprocessing's forkserver). A rank finds torchrun's
variables in its environment and a fresh store behind them, so that ``rankwise.init()`` and
``torch.distributed.init_process_group()`` work as they do under a launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import io
import math
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil

from rankwise.base.errors import RankFailedError
from rankwise.base.rank_names import name_ranks
from rankwise.engine.call_process import make_code_pickler_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

#: Ranks that lost a peer get so long to say so, before they are killed.
_GRACE_S = 5.0
#: Until a process that is told to die of its stack's dump must have done so.
_STACKS_S = 2.0
#: Imported once for all ranks of all cases, with what these import, as far as it is installed; the functions that ranks run come from test
#: modules, and pytest, once torch is there, takes a rank twenty times as long as all else before its first line.
_PRELOAD = [
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed._tools",
    "torch._dynamo",
    "encodings.idna",
    "pytest",
    "rankwise.checkpoint.disk",
    "rankwise.checkpoint.loading",
    "rankwise.parallel.ddp",
    "rankwise.parallel.fsdp",
    "rankwise.parallel.parameter_server",
    "rankwise.runtime.joining",
    "rankwise.testing.ranks",
    "rankwise.train.dropout",
    "rankwise.train.trainer",
]


@dataclass(slots=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        value: What the function returned.
        error: What it raised, if that can be pickled; else a RuntimeError with its text.
        traceback: Its traceback as text; for a rank that was killed, its stacks.
        exit_code: The process's; negative for a signal. None while it is still running.
        failed_s: When it raised or died, on the monotonic clock; None if it did not.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    failed_s: float | None = field(default=None, repr=False)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    cuda: bool = False,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks and return what each returned.

    Args:
        function: What to run; a lambda or a nested function will do.
        world_size: How many ranks.
        *args: Its arguments, the same on each rank.
        timeout_s: Seconds until the ranks are killed.
        cuda: Start fresh processes, as CUDA does not survive a fork.
        env: Variables for all ranks; None unsets one.

    Returns:
        A value for each rank.

    Raises:
        RankFailedError: A rank raised, died or did not end in time; the first to fail comes first, beside all like it.
    """
    outcomes = try_ranks(function, world_size, *args, timeout_s=timeout_s, cuda=cuda, env=env)
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.failed_s is not None]
    if not failed:
        return [outcome.value for outcome in outcomes]
    failed.sort(key=lambda pair: pair[1].failed_s or 0.0)
    alike: dict[str, tuple[list[int], str]] = {}
    for rank, outcome in failed:
        text = f"{outcome.error}\n{outcome.traceback}"
        # Of those that have lost a peer each names another port, and of those that were killed another thread.
        alike.setdefault(re.sub(r"\]:\d+|(?<=hread )0x[0-9a-f]+", "", text), ([], text))[0].append(rank)
    texts = [f"{name_ranks(ranks)}: {text}" for ranks, text in alike.values()]
    raise RankFailedError("\n".join(texts), rank=failed[0][0]) from failed[0][1].error


def try_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    cuda: bool = False,
    env: Mapping[str, str | None] | None = None,
    grace_s: float = _GRACE_S,
) -> list[RankOutcome]:
    """Run ``function(*args)`` on ``world_size`` ranks and return how each ended; for tests of what goes wrong.

    Args:
        function: As for ``run_ranks``, and so are the others.
        world_size: How many ranks.
        *args: The function's arguments.
        timeout_s: Seconds until the ranks are killed.
        cuda: Start fresh processes.
        env: Variables for all ranks.
        grace_s: Seconds that the others get to end when a rank has failed; more where they are meant to continue
            without it.

    Returns:
        An outcome for each rank.
    """
    from torch.distributed import TCPStore  # noqa: PLC0415 - `import rankwise.testing` costs nothing

    context: Any = multiprocessing.get_context("spawn" if cuda else "forkserver")
    if not cuda:
        context.set_forkserver_preload(_PRELOAD)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    outcomes = [RankOutcome() for _ in range(world_size)]
    payload = _pickle(function, args)
    with tempfile.TemporaryDirectory(prefix="rankwise-stacks-") as folder:
        ranks: dict[int, tuple[Any, Connection]] = {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            variables = {**_build_env(rank, world_size, store.port), **(env or {})}
            process = context.Process(target=_run_rank, args=(payload, variables, theirs, f"{folder}/{rank}"))
            process.start()
            theirs.close()
            ranks[rank] = (process, ours)
        _collect(ranks, outcomes, (timeout_s, grace_s), Path(folder))
    del store
    return outcomes


def _pickle(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function by value: the module that a test stands in need not be importable in the rank."""
    module = inspect.getmodule(function)
    by_value = module is not None and not module.__name__.startswith("rankwise.")
    with contextlib.ExitStack() as stack:
        if by_value and module is not None and module.__name__ in sys.modules:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        file = io.BytesIO()
        make_code_pickler_class()(file).dump((function, args))
        return file.getvalue()


def _build_env(rank: int, world_size: int, port: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run_ranks", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _collect(ranks: dict[int, Any], outcomes: list[RankOutcome], bounds_s: tuple[float, float], folder: Path) -> None:
    """Wait until all ranks have ended; kill those that have not in time, and keep their stacks."""
    timeout_s, grace_s = bounds_s
    end, waiting = time.monotonic() + timeout_s, dict(ranks)
    try:
        while waiting and (left_s := end - time.monotonic()) > 0:
            sources = {process.sentinel: rank for rank, (process, _) in waiting.items()}
            sources |= {pipe: rank for rank, (_, pipe) in waiting.items() if not pipe.closed}
            for source in wait(list(sources), left_s):
                rank = sources[source]
                if rank in waiting and _hear(waiting[rank][0], waiting[rank][1], outcomes[rank]):
                    del waiting[rank]
            if any(outcome.failed_s is not None for outcome in outcomes):
                end = min(end, time.monotonic() + grace_s)
                grace_s = math.inf  # counted from the first
    finally:
        _kill(waiting, outcomes, folder, bounds_s)
        for process, pipe in ranks.values():
            pipe.close()
            process.join()
            process.close()


def _hear(process: Any, pipe: Connection, outcome: RankOutcome) -> bool:
    """Take what a rank has sent; return whether it has ended."""
    if not pipe.closed and pipe.poll():
        try:
            kind, value, text, when_s = pipe.recv()
        except EOFError:
            pipe.close()
        else:
            if kind == "value":
                outcome.value = cloudpickle.loads(value)
            else:
                outcome.error, outcome.traceback, outcome.failed_s = cloudpickle.loads(value), text, when_s
            return False
    if process.exitcode is None:
        return False
    outcome.exit_code = process.exitcode
    if outcome.exit_code != 0 and outcome.failed_s is None:
        outcome.failed_s = time.monotonic()
        outcome.error = RuntimeError(f"the process ended with exit code {outcome.exit_code}")
    return True


def _kill(waiting: dict[int, Any], outcomes: list[RankOutcome], folder: Path, bounds_s: tuple[float, float]) -> None:
    """End the ranks that are left, all their stacks first."""
    if waiting and hasattr(signal, "SIGUSR1"):
        for process, _ in waiting.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)  # noqa: TID251 - the stacks are being written
        for rank, (process, _) in waiting.items():
            _dump_children(process.pid, folder / str(rank))
    for rank, (process, _) in waiting.items():
        process.kill()
        process.join()
        outcome = outcomes[rank]
        outcome.exit_code = process.exitcode
        if outcome.failed_s is None:
            outcome.failed_s = time.monotonic()
            outcome.error = TimeoutError(
                f"still running after {bounds_s[0]:.0f} s, or {bounds_s[1]:.0f} s after another rank failed"
            )
            with contextlib.suppress(OSError):
                outcome.traceback = (folder / str(rank)).read_text(errors="replace")


def _dump_children(pid: int, stacks: Path) -> None:
    """Append the stacks of a rank's children, such as a loader's workers: the rank may do no more than wait for them."""
    try:
        rank = psutil.Process(pid)
        rank.suspend()  # it would take their end for an accident, and print an error
        for child in rank.children(recursive=True):
            with stacks.open("a") as file:
                file.write(f"\nIts child {child.pid} ({child.status()}), {shlex.join(child.cmdline())}:\n")
            child.send_signal(signal.SIGABRT)  # faulthandler's, as the rank had it when it forked
            child.wait(_STACKS_S)
    except psutil.Error:
        return


def _run_rank(payload: bytes, variables: Mapping[str, str | None], pipe: Connection, stacks: str) -> None:
    """In the rank: be who the variables say, call, and send what came of it."""
    gc.freeze()  # a collection would write to all that was imported, and so copy it
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251 - this process is a rank being made
        else:
            os.environ[name] = value  # noqa: TID251 - the same
    # A child of multiprocessing starts its own as it was started; a rank of a launcher, such as loaders' workers, as
    # the platform does.
    multiprocessing.set_start_method(None, force=True)
    with open(stacks, "a") as file:  # noqa: PTH123 - held open as long as we live
        faulthandler.enable(file)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file)
        try:
            function, args = cloudpickle.loads(payload)
            value = function(*args)
            pipe.send(("value", cloudpickle.dumps(value), "", 0.0))
        except BaseException as error:  # noqa: BLE001 - told to the test
            pipe.send(("error", _pickle_error(error), "".join(traceback.format_exception(error)), time.monotonic()))
        # A thread of Gloo that drops its last work while Python goes down aborts the process (pytorch#190489).
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _pickle_error(error: BaseException) -> bytes:
    with contextlib.suppress(Exception):
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
        return pickled
    found: bytes = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return found
