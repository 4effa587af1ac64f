"""Run a function on many ranks and get back what each returned, from a script, a notebook or the prompt."""

# mypy: disallow-any-explicit=False
# A function that is called with anything can't be typed without.

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from rankwise.base.environ import environ, is_on
from rankwise.base.errors import UsageError
from rankwise.launcher.function_outcome import is_lost, read_values
from rankwise.launcher.function_payload import make_payload, name_function
from rankwise.launcher.function_pool import Kind, Pool, close_all, find_outputs
from rankwise.launcher.job import find_temporary
from rankwise.warm.plan import LATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launcher.function_payload import Payload
    from rankwise.launcher.pool import Answer

Result = TypeVar("Result")

_COUNTED = ("auto", "gpu", "cpu", "xpu")
#: What a launcher that started us has told us of ourselves is not true of our own ranks.
_OUTER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_OUTER_PREFIXES = ("TORCHELASTIC_", "RANKWISE_", "PET_")
#: What a process reads once, at its start: if it differs, there must be another process.
_READ_AT_START = (*LATCHED, "PYTHON", "CUDA_VISIBLE_DEVICES")

_lock = threading.Lock()
_idle: list[Pool] = []


def launch(
    fn: Callable[..., Result],
    *args: object,
    nprocs: int | str,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str | None] | None = None,
    pass_rank: bool = False,
    preload: Sequence[str] = (),
    cold: bool = False,
) -> list[Result]:
    """Call ``fn(*args)`` on ``nprocs`` new processes of this host, the ranks of one job, and wait for all.

    Each rank finds the variables of torchrun, so that ``rankwise.init()`` and ``torch.distributed.init_process_group()``
    join it. Lambdas, closures and what was typed in will do: nothing is imported again, and a script needs no
    ``if __name__ == "__main__"``. The ranks are no forks of this process, so CUDA may be in use here. The processes that
    start them stay for some minutes: the next call finds torch loaded. For keyword arguments, ``functools.partial``.

    Args:
        fn: What each rank calls.
        *args: Its arguments, the same on each rank.
        nprocs: How many ranks; or ``"gpu"``, ``"cpu"``, ``"auto"`` for what this host has.
        timeout_s: Seconds until the job is stopped; None for never.
        max_restarts: How often all ranks are started again after a failure.
        env: Variables for the ranks, beside this process's own; None takes one out.
        pass_rank: Call ``fn(rank, *args)``, as torch.multiprocessing.spawn does.
        preload: Modules to import once, before the ranks are forked.
        cold: Start each rank as a fresh Python, and import torch in each.

    Returns:
        What each rank returned, by rank. Tensors come back on the CPU.

    Raises:
        UsageError: The call is wrong: ``fn`` can't take these arguments, or can't be pickled; nothing was started.
        RankFailedError: A rank failed; the first cause, with its traceback, and the exception as ``__cause__``.
        LaunchError: The ranks could not be started, or the launcher was killed.
        KeyboardInterrupt: Ctrl-C; the ranks have been stopped.
    """
    _check(fn, args, nprocs, timeout_s, max_restarts=max_restarts, pass_rank=pass_rank)
    payload = make_payload(fn, args, pass_rank=pass_rank)
    kind = Kind(
        num_ranks=str(nprocs),
        cold=cold or is_on("RANKWISE_COLD"),
        preload=tuple(preload),
        first_path=str(Path(sys.path[0] if sys.path else "").absolute()),
        python=sys.executable,
        outputs=find_outputs(),
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # what was printed before the ranks stands before what they print
    folder = Path(tempfile.mkdtemp(prefix="rankwise_call_", dir=find_temporary()))
    try:
        (folder / "payload").write_bytes(payload.data)
        answer, is_late = _run(
            kind, payload, _make_env(env or {}), folder, timeout_s, max_restarts=max_restarts
        )
        values = read_values(answer, folder, name_function(fn), timeout_s=timeout_s if is_late else None)
        return cast("list[Result]", values)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shutdown() -> None:
    """End the processes that stay for the next call. They end by themselves with this process, or after five minutes."""
    with _lock:
        pools = [pool for pool in _idle if pool.owner == os.getpid()]
        _idle.clear()
    for pool in pools:
        pool.close()


atexit.register(close_all)


def _run(
    kind: Kind,
    payload: Payload,
    env: dict[str, str],
    folder: Path,
    timeout_s: float | None,
    *,
    max_restarts: int,
) -> tuple[Answer, bool]:
    """Run a job on a pool that is there, or on a new one; one that was killed while it was idle is no failure."""
    while True:
        pool, is_new = _take(kind, payload.imports, env)
        stays = False
        try:
            differing = {name: env.get(name) for name in _find_differing(env, pool.env)}
            answer, is_late = pool.run(folder, differing, max_restarts=max_restarts, timeout_s=timeout_s)
            stays = not answer.get("lost") and not is_lost(answer)
        except KeyboardInterrupt:
            stays = True  # it has stopped the job, or has been closed
            raise
        finally:
            _give_back(pool, stays=stays)
        if is_new or not answer.get("lost"):
            return answer, is_late


def _take(kind: Kind, imports: tuple[str, ...], env: dict[str, str]) -> tuple[Pool, bool]:
    """Return a pool that can run the job, and whether it is a new one; those that can't are ended."""
    with _lock:
        mine = [pool for pool in _idle if pool.owner == os.getpid()]
        _idle.clear()
    found: Pool | None = None
    for pool in mine:
        fits = pool.kind == kind and set(imports) <= set(pool.imports) and pool.is_alive
        differing = _find_differing(env, pool.env)
        if found is None and fits and not any(name.startswith(_READ_AT_START) for name in differing):
            found = pool
        else:
            pool.close()
    return (found, False) if found is not None else (Pool(kind, imports, env), True)


def _give_back(pool: Pool, *, stays: bool) -> None:
    with _lock:
        # Two threads may launch at once; one of the two pools is enough for later.
        stays = stays and pool.is_alive and not _idle
        if stays:
            _idle.append(pool)
    if not stays:
        pool.close()


def _find_differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name, _ in {*one.items()} ^ {*other.items()}}


def _make_env(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment for ranks of a job of their own."""
    outer = {
        name: value
        for name, value in environ().items()
        if name not in _OUTER and not name.startswith(_OUTER_PREFIXES)
    }
    return {name: value for name, value in {**outer, **changes}.items() if value is not None}


def _check(
    fn: Callable[..., object], args: tuple[object, ...], nprocs: int | str, timeout_s: float | None,
    *, max_restarts: int, pass_rank: bool,
) -> None:  # fmt: skip
    is_count = isinstance(nprocs, int) and not isinstance(nprocs, bool) and nprocs > 0
    if not is_count and nprocs not in _COUNTED:
        raise UsageError(
            f"nprocs is {nprocs!r}: neither a number from 1 nor one of {', '.join(_COUNTED)}",
            hint="rankwise.launch(fn, nprocs=4)",
        )
    if timeout_s is not None and timeout_s <= 0:
        raise UsageError(
            f"timeout_s is {timeout_s}: not above 0", hint="leave it out to wait as long as it takes"
        )
    if max_restarts < 0:
        raise UsageError(f"max_restarts is {max_restarts}: below 0")
    if not callable(fn):
        raise UsageError(
            f"{fn!r} can't be called: it is of type {type(fn).__name__}",
            hint="give the function itself, and its arguments after it: launch(train, config, nprocs=4)",
        )
    _check_arguments(fn, args, pass_rank=pass_rank)


def _check_arguments(fn: Callable[..., object], args: tuple[object, ...], *, pass_rank: bool) -> None:
    try:
        signature = inspect.signature(fn)
        signature = signature.replace(return_annotation=signature.empty)
    except (ValueError, TypeError):
        return  # a function of C's: it will say so itself
    try:
        signature.bind(*(0,) * pass_rank, *args)
    except TypeError as error:
        hint = f"launch(fn, *args) calls fn(*args); give {name_function(fn)} its arguments after it"
        with contextlib.suppress(TypeError):
            signature.bind(*(() if pass_rank else (0,)), *args)
            hint = (
                "take pass_rank=True out: the function has no place for the rank"
                if pass_rank
                else "pass_rank=True gives the rank first, as torch.multiprocessing.spawn does"
            )
        given = f"{'the rank and ' if pass_rank else ''}{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise UsageError(
            f"{name_function(fn)}{signature} can't be called with {given}: {error}", hint=hint
        ) from None
