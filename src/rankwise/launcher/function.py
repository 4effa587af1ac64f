"""Run a function on many ranks and get back what each returned, from a script, a notebook or the prompt."""

# mypy: disallow-any-explicit=False
# A function that is called with anything can't be typed without.

from __future__ import annotations

import atexit
import contextlib
import inspect
import math
import operator
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from rankwise.base.environ import environ, get, is_on
from rankwise.base.errors import LaunchError, UsageError
from rankwise.launcher.function_outcome import read_values
from rankwise.launcher.function_payload import make_payload, name_function
from rankwise.launcher.function_pool import Pool, close_all, find_flags, find_outputs
from rankwise.launcher.job import find_temporary
from rankwise.launcher.pool_protocol import Call, Kind
from rankwise.launcher.spec import may_watch
from rankwise.warm.plan import LATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launcher.function_payload import Payload
    from rankwise.launcher.pool_protocol import Answer

Result = TypeVar("Result")

_COUNTED = ("auto", "gpu", "cpu", "xpu")
#: What a launcher that started us has told us of ourselves is not true of our own ranks.
_OUTER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_OUTER_PREFIXES = ("TORCHELASTIC_", "PET_")
#: How our own processes speak to each other; what else begins with RANKWISE_ is a setting of the user's.
_OWN = (
    "RANKWISE_CALL", "RANKWISE_LOADING", "RANKWISE_RANK", "RANKWISE_WARM", "RANKWISE_LIFELINE", "RANKWISE_EMPTY_PYTHONPATH",
)  # fmt: skip
#: What a process reads once, at its start: if it differs, there must be another process.
_READ_AT_START = (*LATCHED, "PYTHON", "CUDA_VISIBLE_DEVICES")

#: So many wait for another call of their kind: a notebook that goes to and fro between two counts of ranks.
_MOST_IDLE = 2

_lock = threading.Lock()
#: The one that was used last stands last.
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
    **unknown: NoReturn,
) -> list[Result]:
    """Call ``fn(*args)`` on ``nprocs`` new processes of this host, the ranks of one job, and wait for all.

    Each rank finds the variables of torchrun, so that ``rankwise.init()`` and
    ``torch.distributed.init_process_group()`` join it. Lambdas, closures, a script's own functions and what was typed
    in are sent as they are, with the globals that they use; a script needs no ``if __name__ == "__main__"``. Functions
    of importable modules are imported again in each rank: a global that was set there while this process ran is not
    sent. The ranks are not forks of this process, so CUDA may be in use here. The processes that start them stay for
    some minutes: the next call finds torch loaded. For keyword arguments, ``functools.partial``. From another thread,
    ``rankwise.launcher.function.shutdown()`` stops a call.

    Args:
        fn: What each rank calls.
        *args: Its arguments, the same on each rank.
        nprocs: How many ranks; or ``"gpu"``, ``"cpu"``, ``"auto"`` for what this host has.
        timeout_s: Seconds until the job is stopped, the ranks' start among them; None for never.
        max_restarts: How often all ranks are started again after a failure.
        env: Variables for the ranks, beside this process's own; None unsets one. Those of ranks can't be set.
        pass_rank: Call ``fn(rank, *args)``, as torch.multiprocessing.spawn does.
        preload: Modules to import once, before the ranks are forked.
        cold: Start each rank as a fresh Python, and import torch in each.
        **unknown: None is known; an error names the right keyword.

    Returns:
        What each rank returned, by rank. Tensors come back on the CPU.

    Raises:
        UsageError: The call is wrong: ``fn`` can't take these arguments, or can't be pickled; nothing was started.
        RankFailedError: A rank failed; the first cause, with its traceback, and the exception as ``__cause__``.
        LaunchError: The ranks could not be started, or the launcher was killed, or shut down by another thread.
        KeyboardInterrupt: Ctrl-C; the ranks have been stopped.
    """
    _check_keywords(unknown, fn)
    _check_place()
    num_ranks = _check_count(nprocs)
    _check_limits(timeout_s, max_restarts, preload)
    _check_env(env or {})
    may_watch({**environ(), **{name: value for name, value in (env or {}).items() if value is not None}})
    _check_function(fn)
    _check_arguments(fn, args, pass_rank=pass_rank)
    payload = make_payload(fn, args, pass_rank=pass_rank)
    kind = Kind(
        num_ranks=num_ranks,
        cold=cold or is_on("RANKWISE_COLD"),
        preload=tuple(preload),
        first_path=str(Path(sys.path[0] if sys.path else "").absolute()),
        python=sys.executable,
        flags=find_flags(),
        outputs=find_outputs(),
    )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # what was printed before the ranks stands before what they print
    folder = _make_folder(payload)
    try:
        restarts = operator.index(max_restarts)
        answer = _run(kind, payload, _make_env(env or {}), folder, timeout_s, max_restarts=restarts)
        limit_s = timeout_s if answer.is_late else None
        return cast("list[Result]", read_values(answer, folder, name_function(fn), timeout_s=limit_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shutdown() -> None:
    """End the processes that stay for the next call. They end by themselves with this process, or after five minutes.

    A call that is at work in another thread ends with LaunchError.
    """
    with _lock:
        _idle.clear()
    close_all()


atexit.register(close_all)


def _run(
    kind: Kind,
    payload: Payload,
    env: dict[str, str],
    folder: Path,
    timeout_s: float | None,
    *,
    max_restarts: int,
) -> Answer:
    """Run a job on a pool that is there, or on a new one; one that was killed while it was idle is no failure."""
    while True:
        pool, is_new = _take(kind, payload.imports, env)
        stays = False
        try:
            differing = {name: env.get(name) for name in _find_differing(env, pool.env)}
            call = Call(folder=folder, variables=differing, max_restarts=max_restarts)
            answer = pool.run(call, timeout_s=timeout_s)
            stays = not answer.is_lost
        except KeyboardInterrupt:
            stays = True  # it has stopped the job, or has been closed
            raise
        finally:
            _give_back(pool, stays=stays)
        if is_new or answer.is_late or answer.verdict is not None:
            return answer


def _take(kind: Kind, imports: tuple[str, ...], env: dict[str, str]) -> tuple[Pool, bool]:
    """Return a pool that can run the job, and whether it is a new one; those that have ended are taken off the list."""
    with _lock:
        mine = [pool for pool in _idle if pool.owner == os.getpid()]
        ended = [pool for pool in mine if not pool.is_alive]
        found = next((pool for pool in mine if pool not in ended and _fits(pool, kind, imports, env)), None)
        _idle[:] = [pool for pool in mine if pool not in ended and pool is not found]
    for pool in ended:
        pool.close()
    return (found, False) if found is not None else (Pool(kind, imports, env), True)


def _fits(pool: Pool, kind: Kind, imports: tuple[str, ...], env: dict[str, str]) -> bool:
    differing = _find_differing(env, pool.env)
    same = pool.kind == kind and set(imports) <= set(pool.imports)
    return same and not any(name.startswith(_READ_AT_START) for name in differing)


def _give_back(pool: Pool, *, stays: bool) -> None:
    with _lock:
        # Two threads may launch at once; one of two like pools is enough for later.
        if stays and pool.is_alive and not any(other.kind == pool.kind for other in _idle):
            _idle.append(pool)
            unwanted = _idle[:-_MOST_IDLE]
            del _idle[:-_MOST_IDLE]
        else:
            unwanted = [pool]
    for one in unwanted:
        one.close()


def _find_differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name, _ in {*one.items()} ^ {*other.items()}}


def _make_env(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment for ranks of a job of their own."""
    outer = {name: value for name, value in environ().items() if not _is_ours(name)}
    return {name: value for name, value in {**outer, **changes}.items() if value is not None}


def _is_ours(name: str) -> bool:
    return name in {*_OUTER, *_OWN} or name.startswith(_OUTER_PREFIXES)


def _make_folder(payload: Payload) -> Path:
    """Make the folder of a call, with the payload in it."""
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="rankwise_call_", dir=find_temporary()))
        (folder / "payload").write_bytes(payload.data)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise LaunchError(
            f"{len(payload.data)} bytes for the ranks can't be written to {folder or 'a temporary folder'}: {error.strerror}",
            hint="free some space there, or set TMPDIR to another folder before Python starts",
        ) from error
    return folder


def _check_keywords(unknown: Mapping[str, object], fn: object) -> None:
    if not unknown:
        return
    name, value = next(iter(unknown.items()))
    hint = f"for an argument of the function: launch(functools.partial({name_function(fn)}, {name}=…), nprocs=4)"
    if name == "args":
        given = ", ".join(map(repr, value)) if isinstance(value, (list, tuple)) else "…"
        hint = f"the arguments go after the function: launch({name_function(fn)}, {given}, nprocs=4)"
    raise UsageError(f"launch has no keyword {name!r}", hint=hint)


def _check_place() -> None:
    """Refuse a call from a module that a rank imports to find its function: each rank would start ranks, and so on."""
    if get("RANKWISE_LOADING") != str(os.getpid()):
        return
    frame, module = inspect.currentframe(), "a module"
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            module = f"the module {frame.f_globals.get('__name__')!r}"
            break
        frame = frame.f_back
    raise UsageError(
        f"{module} calls launch when it is imported, and each rank imports it to find the function",
        hint='put the call under if __name__ == "__main__", or into a function',
    )


def _check_count(nprocs: object) -> str:
    """Return the number of ranks, or what to count, as text."""
    if isinstance(nprocs, str) and nprocs in _COUNTED:
        return nprocs
    with contextlib.suppress(TypeError):
        count = operator.index(nprocs)  # type: ignore[arg-type]
        if count > 0 and not isinstance(nprocs, bool):
            return str(count)
    raise UsageError(
        f"nprocs is {nprocs!r}: neither a number above 0 nor one of {', '.join(_COUNTED)}",
        hint="rankwise.launch(fn, nprocs=4)",
    )


def _check_limits(timeout_s: object, max_restarts: object, preload: object) -> None:
    if timeout_s is not None:
        limit = math.nan
        with contextlib.suppress(TypeError, ValueError):
            limit = math.nan if isinstance(timeout_s, (str, bool)) else float(timeout_s)  # type: ignore[arg-type]
        if not limit > 0:
            raise UsageError(
                f"timeout_s is {timeout_s!r}: not a number above 0",
                hint="leave it out to wait as long as it takes",
            )
    try:
        restarts = operator.index(max_restarts)  # type: ignore[arg-type]
    except TypeError:
        restarts = -1
    if restarts < 0:
        raise UsageError(f"max_restarts is {max_restarts!r}: not a whole number from 0", hint="max_restarts=3")
    is_list = isinstance(preload, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) for name in cast("list[object]", preload)):
        hint = f"preload=[{preload!r}]" if isinstance(preload, str) else 'preload=["transformers"]'
        raise UsageError(f"preload is {preload!r}: not a list of module names", hint=hint)


def _check_env(changes: Mapping[str, object]) -> None:
    for name, value in cast("Mapping[object, object]", changes).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"env has {name!r}, which can't be the name of a variable", hint='env={"NAME": "value"}')
        if value is not None and (not isinstance(value, str) or "\0" in value):
            what = "contains a NUL" if isinstance(value, str) else f"is of type {type(value).__name__}"
            raise UsageError(
                f"env: the value of {name} {what}: {value!r}",
                hint="pass a str, or None to unset the variable",
            )
        if value is not None and _is_ours(name):
            raise UsageError(
                f"env sets {name}, which the launcher itself sets for each rank",
                hint="leave it out; pass a value of your own as an argument, or under another name",
            )


def _check_function(fn: object) -> None:
    if not callable(fn):
        raise UsageError(
            f"{fn!r} can't be called: it is of type {type(fn).__name__}",
            hint="give the function itself, and its arguments after it: launch(train, config, nprocs=4)",
        )
    name, called = name_function(fn), (fn, getattr(type(fn), "__call__", None))  # noqa: B004 - how it is called
    if any(inspect.iscoroutinefunction(one) for one in called):
        raise UsageError(
            f"{name} is a coroutine function: its call runs nothing",
            hint=f"launch(lambda: asyncio.run({name}()), nprocs=4)",
        )
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in called):
        raise UsageError(
            f"{name} is a generator function: its call runs nothing, and a generator can't be sent back",
            hint=f"launch(lambda: list({name}()), nprocs=4)",
        )


def _check_arguments(fn: Callable[..., object], args: tuple[object, ...], *, pass_rank: bool) -> None:
    try:
        # As it is called: a decorator may give the function inside arguments of its own.
        signature = inspect.signature(fn, follow_wrapped=False)
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
                "remove pass_rank=True: the function has no parameter for the rank"
                if pass_rank
                else "pass_rank=True passes the rank first, as torch.multiprocessing.spawn does"
            )
        given = f"{'the rank and ' if pass_rank else ''}{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise UsageError(f"{name_function(fn)}{signature} can't be called with {given}: {error}", hint=hint) from None
