"""A function is called on many ranks: what it returns comes back, what it raises is raised, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
from rankwise.base.errors import LaunchError, RankFailedError, UsageError
from rankwise.launcher import function, function_pool
from rankwise.launcher.function_outcome import read_values
from rankwise.launcher.pool_protocol import Answer
from rankwise.verdict.case import Verdict
from support import (
    Running,
    Terminal,
    leftovers,
    list_marked,
    make_env,
    make_resident_env,
    wait_until,
    without_patience,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.linux
PYTHON = (sys.executable, "-W", "error")


@pytest.fixture(scope="module", autouse=True)
def the_pool_ends() -> Iterator[None]:
    """Tests in this process share one pool, whose ranks are forked off a resident server; it ends with the last of them."""
    with pytest.MonkeyPatch.context() as context:
        for name, value in make_resident_env().items():
            context.setenv(name, value)
        yield
        function.shutdown()


@pytest.fixture
def a_supervisor_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The launcher starts its supervisor itself, and is its parent."""
    function.shutdown()
    monkeypatch.setenv("RANKWISE_RESIDENT", "0")
    yield
    function.shutdown()


def run_script(text: str, folder: Path, **options: Any) -> Any:
    """Run a program that calls launch, in a process of its own, and expect it to end well."""
    path = write_script(folder, text, "program.py")
    result = Running([*PYTHON, str(path)], folder, **options).finish()
    assert result.code == 0, result.err
    return result


#: Not a function.
TRAIN: Any = 3


NUMBER: Any = 1
WORD: Any = "1"
LOCK = threading.Lock()


def use_lock() -> Any:
    return LOCK


async def a_coroutine() -> None: ...


def a_generator() -> Any:
    yield 1


@dataclass
class Point:
    """A class that the ranks can't import: this module is no importable one for them."""

    x: int


def add_up(x: float) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.full((2,), x + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total


def test_each_ranks_result_comes_back() -> None:
    """The list holds what each rank returned, by rank; torchrun's variables tell a rank who it is."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    found = rankwise.launch(lambda: [os.environ[name] for name in names], nprocs=2)
    assert found == [["0", "0", "2", "localhost"], ["1", "1", "2", "localhost"]]


def test_ranks_meet() -> None:
    """The ranks form a process group, and tensors come back."""
    assert [total.tolist() for total in rankwise.launch(add_up, 3.0, nprocs=2)] == [[7.0, 7.0], [7.0, 7.0]]


def test_objects_of_all_kinds_come_back() -> None:
    """A class of the caller's is the same class on return; arrays, None, parameters and 100 MB come back whole."""

    def make(point: Point) -> Any:
        import numpy
        import torch

        return Point(point.x + 1), numpy.arange(3), None, torch.nn.Parameter(torch.ones(2)), bytes(100 << 20)

    (point, array, nothing, parameter, much), _ = rankwise.launch(make, Point(1), nprocs=2)
    assert point == Point(2)
    assert type(point) is Point
    assert array.tolist() == [0, 1, 2]
    assert nothing is None
    assert parameter.requires_grad
    assert parameter.tolist() == [1.0, 1.0]
    assert len(much) == 100 << 20


def test_the_rank_can_be_passed() -> None:
    """With pass_rank the function is called as torch.multiprocessing.spawn calls it; partials carry keywords."""
    call = functools.partial(lambda rank, word, end="": f"{rank}{word}{end}", end="!")
    assert rankwise.launch(call, "a", nprocs=2, pass_rank=True) == ["0a!", "1a!"]


def test_ranks_stand_where_the_caller_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, sys.path and sys.argv are the caller's of this moment, and its modules can be imported."""
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "argv", ["me", "--flag"])

    def look() -> Any:
        import beside  # type: ignore[import-not-found]

        return beside.NAME, str(Path.cwd()), sys.argv

    assert rankwise.launch(look, nprocs=2) == [("found", str(tmp_path), ["me", "--flag"])] * 2


def test_a_second_call_finds_the_processes_there() -> None:
    """Two calls of one kind run under the same supervisor; another number of ranks, or a variable of torch's, gets another."""
    parents = {parent for _ in range(3) for parent in rankwise.launch(os.getppid, nprocs=2)}
    assert len(parents) == 1
    assert rankwise.launch(os.getppid, nprocs=2, env={"SOME_WORD": "x"})[0] in parents
    other = rankwise.launch(os.getppid, nprocs=2, env={"OMP_NUM_THREADS": "1"})[0]
    assert other not in parents


def test_variables_are_the_callers_and_no_outer_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set after the first call counts, env goes on top, and a launcher around the caller does not leak in."""
    rankwise.launch(lambda: 0, nprocs=2)
    for name, value in {
        "RANK": "7",
        "TORCHELASTIC_RUN_ID": "outer",
        "A_WORD": "a",
        "B_WORD": "b",
        "LATE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    found, _ = rankwise.launch(lambda: dict(os.environ), nprocs=2, env={"A_WORD": "c", "B_WORD": None})
    assert (found["RANK"], found["A_WORD"], found["LATE"]) == ("0", "c", "1")
    assert "B_WORD" not in found
    assert found["TORCHELASTIC_RUN_ID"] != "outer"
    assert not [name for name in found if name.startswith("RANKWISE_") and "RESIDENT" not in name]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        pytest.param(lambda: rankwise.launch(add_up, nprocs=2), r"add_up\(x: .float.\) can't be called with 0 arg", id="too-few"),
        pytest.param(lambda: rankwise.launch(lambda rank, x: rank + x, 1, nprocs=2), "pass_rank=True passes", id="rank-missing"),
        pytest.param(lambda: rankwise.launch(lambda x: x, 1, nprocs=2, pass_rank=True), "remove pass_rank", id="rank-given"),
        pytest.param(lambda: rankwise.launch(TRAIN, nprocs=2), "type int", id="no-function"),
        pytest.param(lambda: rankwise.launch(len, nprocs=0), "nprocs is 0", id="no-ranks"),
        pytest.param(lambda: rankwise.launch(len, nprocs="many"), "nprocs is 'many'", id="wrong-word"),
        pytest.param(lambda: rankwise.launch(str, threading.Lock(), nprocs=1), r"argument 1 of str \(of type lock\) can't be sent", id="lock"),
        pytest.param(lambda: rankwise.launch(use_lock, nprocs=1), r"the global 'LOCK' in use_lock \(of type lock\)", id="global"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"RANK": "3"}), "env sets RANK", id="env-rank"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"RANKWISE_WATCH": "maybe"}), "RANKWISE_WATCH='maybe' is not one of", id="env-watch"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"RANKWISE_CALL": "3"}), "env sets RANKWISE_CALL", id="env-private"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"A": NUMBER}), "value of A is of type int: 1", id="env-number"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"A": "a\0b"}), "value of A contains a NUL", id="env-nul"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, env={"A=": "a"}), "'A=', which can't be", id="env-name"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, preload="torch"), r"preload=\['torch'\]", id="preload"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, timeout_s=float("nan")), "timeout_s is nan", id="nan"),
        pytest.param(lambda: rankwise.launch(len, nprocs=1, timeout_s=WORD), "timeout_s is '1'", id="time-word"),
        pytest.param(lambda: rankwise.launch(add_up, args=(2,), nprocs=1), r"launch\(add_up, 2, nprocs=4\)", id="args"),
        pytest.param(lambda: rankwise.launch(add_up, x=2, nprocs=1), r"partial\(add_up, x=", id="keyword"),
        pytest.param(lambda: rankwise.launch(a_coroutine, nprocs=1), r"asyncio.run\(a_coroutine", id="coroutine"),
        pytest.param(lambda: rankwise.launch(a_generator, nprocs=1), r"list\(a_generator", id="generator"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_told_before_anything_starts(call: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that don't fit, a count that is none, what can't be pickled: the caller is told what and how to mend it."""
    monkeypatch.setattr(function, "_run", lambda *_args, **_options: pytest.fail("something was started"))
    with pytest.raises(UsageError, match=told):
        call()


def test_a_decorator_may_supply_arguments() -> None:
    """What counts is how the decorated function is called, not what stands inside."""

    def give_two(function: Any) -> Any:
        return functools.wraps(function)(lambda: function(2))

    assert rankwise.launch(give_two(lambda x: x), nprocs=1) == [2]


def test_counts_of_other_types_will_do() -> None:
    """A numpy integer is a number of ranks."""
    import numpy

    assert rankwise.launch(lambda: 1, nprocs=numpy.int64(2), max_restarts=numpy.int64(0)) == [1, 1]  # type: ignore[arg-type]


def test_settings_of_the_users_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANKWISE_ variables that a user may set are passed on."""
    monkeypatch.setenv("RANKWISE_HANDSHAKE", "0")
    names = ("RANKWISE_HANDSHAKE", "RANKWISE_ARRIVAL_TIMEOUT")
    call = rankwise.launch(
        lambda: [os.environ.get(name) for name in names], nprocs=1, env={"RANKWISE_ARRIVAL_TIMEOUT": "9"}
    )
    assert call == [["0", "9"]]


def test_a_folder_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose folder was removed is told so."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the current folder of this process is gone"):
        rankwise.launch(os.getpid, nprocs=1)


class TroubleError(Exception):
    """An exception that needs two arguments: plain pickle can't make it anew."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} {code}")


def test_the_first_cause_is_raised_with_its_traceback() -> None:
    """The rank that failed is named, with its text, its traceback and its exception; the others are its casualties."""

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("the key")
        add_up(1.0)

    with pytest.raises(RankFailedError) as caught:
        rankwise.launch(fail, nprocs=2)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("[rank 1] KeyError: 'the key'")
    assert 'raise KeyError("the key")' in text
    assert "call_process" not in text
    assert isinstance(caught.value.__cause__, KeyError)
    assert "rank 0" in text


def test_the_rank_that_failed_first_is_named_though_all_fail_alike(tmp_path: Path) -> None:
    """Of ranks that fail alike the error names the first, with that one's exception."""

    def fail(rank: int) -> None:
        if rank == 0:
            wait_until((tmp_path / "failing").exists, what="rank 1")
            threading.Event().wait(0.3)
        (tmp_path / "failing").touch()
        raise ValueError(f"of rank {rank}")

    with pytest.raises(RankFailedError, match="Traceback on rank 1 of 2") as caught:
        rankwise.launch(fail, nprocs=2, pass_rank=True)
    assert caught.value.rank == 1
    assert str(caught.value.__cause__) == "of rank 1"


def test_an_exception_that_cant_be_made_anew_is_told_by_its_text() -> None:
    """The message and the traceback are there although the exception itself can't travel."""

    def fail() -> None:
        raise TroubleError("bad", code=3)

    with pytest.raises(RankFailedError, match="TroubleError: bad 3") as caught:
        rankwise.launch(fail, nprocs=2)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("end", "told"),
    [
        pytest.param(lambda: sys.exit(3), "ended with exit code 3", id="exit-3"),
        pytest.param(lambda: sys.exit(0), r"sys.exit\(0\) was called before", id="exit-0"),
        pytest.param(lambda: os._exit(0), r"exited with code 0 before .* returned", id="hard-exit-0"),
        pytest.param(lambda: os.kill(os.getpid(), 9), "killed by SIGKILL", id="killed"),
        pytest.param(lambda: os.kill(os.getpid(), 11), "killed by SIGSEGV", id="segfault"),
    ],
)
def test_a_rank_that_ends_without_a_result_is_told_how(end: Any, told: str) -> None:
    """An exit, even with code 0, and a signal are failures, named by what they were."""
    with pytest.raises(RankFailedError, match=told):
        rankwise.launch(end, nprocs=2)


def test_a_result_that_cant_be_pickled_is_told_with_rank_and_type() -> None:
    """The error names the rank, the type, and why."""
    with pytest.raises(RankFailedError, match=r"can't be sent back: _thread\.lock: TypeError") as caught:
        rankwise.launch(lambda: threading.Lock() if os.environ["RANK"] == "1" else None, nprocs=2)
    assert caught.value.rank == 1


def test_such_an_error_shows_no_frames_of_ours() -> None:
    """Of a result that can't be pickled no traceback through pickle is shown."""
    with pytest.raises(RankFailedError) as caught:
        rankwise.launch(threading.Lock, nprocs=1)
    assert "File" not in str(caught.value)
    assert "direct cause" not in str(caught.value)


def test_a_dtensor_is_refused_with_the_remedy() -> None:
    """A tensor that lies on several ranks is not one rank's to return: the error says what is."""

    def spread() -> Any:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))

    with pytest.raises(RankFailedError, match=r"can't be sent back: .*x\.full_tensor\(\)"):
        rankwise.launch(spread, nprocs=1)


class Fragile:
    """Can be pickled, and fails where it is made anew."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_a_result_that_cant_be_loaded_is_told_with_its_rank() -> None:
    """The rank whose result fails in the caller is named, with the reason."""
    with pytest.raises(RankFailedError, match=r"can't be loaded here: ValueError: invalid literal") as caught:
        rankwise.launch(lambda rank: Fragile() if rank else None, nprocs=2, pass_rank=True)
    assert caught.value.rank == 1


def test_a_full_disk_is_told_as_such() -> None:
    """A result for which there is no room names the folder and TMPDIR, and is not said to be unfit for pickle."""

    def return_much() -> bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return bytes(100_000)

    with pytest.raises(RankFailedError, match=r"no space .* TMPDIR .*rankwise_call_") as caught:
        rankwise.launch(return_much, nprocs=1)
    assert "can't be sent back" not in str(caught.value)


def test_a_payload_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the arguments can't be written down, folder and TMPDIR are named, and the folder goes."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(LaunchError, match=r"rankwise_call_.*: File too large") as caught:
            rankwise.launch(len, bytes(100_000), nprocs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "TMPDIR" in str(caught.value)
    folder = next(word for word in str(caught.value).split() if "rankwise_call_" in word).rstrip(":")
    assert not Path(folder).exists()


def test_time_out_tells_who_was_still_running_and_where() -> None:
    """The rank that had not returned is named, with the line where it stood; the next call works."""

    def wait(rank: int) -> None:
        if rank:
            threading.Event().wait(60)

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 had not returned from .*wait after 1 s") as caught:
        rankwise.launch(wait, nprocs=2, pass_rank=True, timeout_s=1)
    assert "test_function.py:" in str(caught.value)
    assert rankwise.launch(lambda: 5, nprocs=2) == [5, 5]


def test_a_failure_is_tried_again() -> None:
    """With max_restarts the values are those of the attempt that succeeded."""

    def fail_once() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first time")
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert rankwise.launch(fail_once, nprocs=2, max_restarts=1) == ["1", "1"]
    assert "the first time" in err.getvalue()


def test_output_goes_where_the_callers_goes() -> None:
    """With sys.stdout replaced, as in a notebook, both streams of the ranks arrive there, whole, before launch returns."""

    def speak() -> None:
        if os.environ["RANK"] == "0":
            print("öut " * 40_000)
        print("err", file=sys.stderr)

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        rankwise.launch(speak, nprocs=2)
    assert out.getvalue().count("öut ") == 40_000
    assert err.getvalue() == "err\nerr\n"


def test_a_letter_that_cant_be_shown_does_not_silence_the_rest() -> None:
    """On an ASCII stream other letters are shown as numbers, and all that follows is shown."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream):
        rankwise.launch(lambda: print("é", flush=True) or print("after"), nprocs=1)
    assert stream.buffer.getvalue() == b"\\xe9\nafter\n"  # type: ignore[attr-defined]


def test_an_error_is_not_printed_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    """The exception carries all: neither a rank nor the launcher writes it to standard error a second time."""
    with pytest.raises(RankFailedError):
        rankwise.launch(lambda: 1 / 0, nprocs=2)
    assert capfd.readouterr().err == ""


def test_a_notebooks_functions_travel() -> None:
    """Functions that stand in a __main__ without a file, and call each other, run in the ranks."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("import os\ndef half(x): return x / 2\ndef train(x): return half(x) + int(os.environ['RANK'])", names)
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        assert rankwise.launch(names["train"], 4, nprocs=2) == [2.0, 3.0]
    finally:
        sys.modules["__main__"] = main


def test_it_works_in_a_thread_and_in_an_event_loop(tmp_path: Path) -> None:
    """Another thread than the main one, and a running loop, can launch; two calls at once run side by side."""

    def meet(mine: str, other: str) -> int:
        (tmp_path / mine).touch()
        wait_until((tmp_path / other).exists, what="the other call's rank")
        return os.getpid()

    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda names=names: found.append(rankwise.launch(meet, *names, nprocs=1)))
        for names in (("a", "b"), ("b", "a"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pid for (pid,) in found}) == 2

    async def main() -> Any:
        return rankwise.launch(lambda: 1, nprocs=1)

    assert asyncio.run(main()) == [1]


def test_a_rank_can_launch() -> None:
    """A job inside a rank is a job of its own, with ranks counted from 0."""

    def outer() -> Any:
        import rankwise

        return rankwise.launch(lambda: os.environ["RANK"] + os.environ["WORLD_SIZE"], nprocs=2, cold=True)

    assert rankwise.launch(outer, nprocs=1) == [["02", "12"]]


def test_a_killed_pool_is_replaced() -> None:
    """Whoever of the waiting processes was killed between two calls, the next call starts what is missing."""
    supervisor = rankwise.launch(os.getppid, nprocs=1)[0]
    os.kill(supervisor, signal.SIGKILL)
    state = Path(f"/proc/{supervisor}/stat")
    wait_until(lambda: not state.exists() or ") Z " in state.read_text(), what="the supervisor's end")
    (again,) = rankwise.launch(os.getppid, nprocs=1)
    assert again != supervisor
    launcher = function._idle[-1]._process
    launcher.kill()
    launcher.wait()
    assert rankwise.launch(os.getppid, nprocs=1)[0] != again


@pytest.mark.usefixtures("a_supervisor_of_ones_own")
def test_shutdown_ends_what_stays() -> None:
    """After shutdown neither the launcher nor its supervisor is there; the next call starts others."""
    supervisor = rankwise.launch(os.getppid, nprocs=1)[0]
    function.shutdown()
    assert not Path(f"/proc/{supervisor}").exists()
    assert rankwise.launch(os.getppid, nprocs=1)[0] != supervisor


def test_an_idle_pool_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call for long enough the processes go; the next call starts others, even if it comes at that moment."""
    function.shutdown()
    monkeypatch.setattr(function_pool, "_IDLE_S", 0.05)
    supervisor = rankwise.launch(os.getppid, nprocs=1)[0]
    wait_until(lambda: not Path(f"/proc/{supervisor}").exists(), what="the pool's end")
    monkeypatch.setattr(function_pool.Pool, "is_alive", True)  # as it was a moment ago
    assert rankwise.launch(os.getppid, nprocs=1)[0] != supervisor
    function.shutdown()


@pytest.mark.parametrize("python", [None, "/no/python"])
def test_a_python_that_cant_be_started_is_told(python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sys.executable is named, and no descriptor stays open."""
    function.shutdown()
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(LaunchError, match=f"{python} can't be started"):
        rankwise.launch(os.getpid, nprocs=1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_two_kinds_of_call_can_alternate() -> None:
    """A call of another number of ranks in between does not end the pool of the first."""
    supervisor = rankwise.launch(os.getppid, nprocs=1)[0]
    rankwise.launch(os.getppid, nprocs=2)
    assert rankwise.launch(os.getppid, nprocs=1)[0] == supervisor


def test_shutdown_stops_a_call_of_another_thread(tmp_path: Path) -> None:
    """A call at work in another thread ends with an error that says why."""

    def work() -> None:
        (tmp_path / "here").touch()
        threading.Event().wait(60)

    raised: list[BaseException] = []

    def call() -> None:
        try:
            rankwise.launch(work, nprocs=1)
        except LaunchError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until((tmp_path / "here").exists, what="the rank")
    function.shutdown()
    thread.join(20)
    assert "shutdown() was called while it ran" in str(raised[0])


class Slow:
    """What takes a rank a minute to load, before the function is called."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return time.sleep, (60,)


def test_time_that_was_up_before_a_rank_started_is_told() -> None:
    """A limit shorter than the ranks' start says that none had started, and names no rank."""
    with pytest.raises(RankFailedError, match=r"no rank had started to call .* after 0.01 s") as caught:
        rankwise.launch(print, Slow(), nprocs=1, timeout_s=0.01)
    assert caught.value.rank is None


def test_ranks_that_return_while_the_limit_ends_the_job_are_no_nameless_ones(tmp_path: Path) -> None:
    """Where all have returned by the time that the job was stopped for its limit, the error says so."""
    for name in ("begun.0.0", "value.0.0"):
        (tmp_path / name).touch()
    late = Answer(num_ranks=1, verdict=Verdict(kind="failure", stopped_by="SIGTERM"), is_late=True)
    with pytest.raises(RankFailedError, match=r"^work returned on all ranks, later than after 2 s") as caught:
        read_values(late, tmp_path, "work", timeout_s=2)
    assert caught.value.rank is None


def test_counting_what_is_not_there_is_told() -> None:
    """With nprocs="gpu" on a host without one, the caller is told so."""
    if __import__("torch").cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(UsageError, match="nprocs=gpu: "):
        rankwise.launch(os.getppid, nprocs="gpu")


@pytest.mark.usefixtures("a_supervisor_of_ones_own")
def test_a_launcher_killed_at_work_is_told() -> None:
    """The caller does not wait for a launcher that is gone."""

    def kill() -> None:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        threading.Event().wait(60)

    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        rankwise.launch(kill, nprocs=1)


# ------------------------------------------------------------------ programs of their own

_TRAIN = """
    import os, rankwise, sys
    print("once", flush=True)
    def train(x):
        return x + int(os.environ["RANK"])
    print(rankwise.launch(train, 1, nprocs=2))
"""


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` runs once, and leaves no process, and no warning, at its end."""
    assert run_script(_TRAIN, tmp_path).out == "once\n[1, 2]\n"


@pytest.mark.parametrize("how", ["-c", "-", "-i"])
def test_it_works_from_the_prompt(how: str, tmp_path: Path) -> None:
    """`python -c`, a script on standard input and the interactive prompt can launch what was typed there."""
    text = "import os, rankwise\ndef f(): return os.environ['RANK']\n\nprint(rankwise.launch(f, nprocs=2))\n"
    command, stdin = [[*PYTHON, "-c", text], None] if how == "-c" else [[*PYTHON, how], text]
    result = Running(command, tmp_path, stdin=stdin).finish()
    assert (result.code, result.out) == (0, "['0', '1']\n"), result.err


def test_a_traceback_shows_what_was_typed(tmp_path: Path) -> None:
    """At the terminal's prompt output is inherited; an error there names the line of a function in no file."""
    with Terminal([sys.executable, "-q"], tmp_path, {"PYTHON_BASIC_REPL": "1", "NO_COLOR": "1"}) as terminal:
        terminal.type("import rankwise, sys\ndef f(): print(sys.stdout.isatty()); return 1 / 0\n\n")
        terminal.type("rankwise.launch(f, nprocs=1)\n")
        wait_until(lambda: "RankFailedError: [rank 0] ZeroDivisionError" in terminal.text, what="the error")
        wait_until(lambda: terminal.text.endswith(">>> "), what="the prompt")
        assert "True" in terminal.text
        assert 'File "<' in terminal.text
        terminal.type("exit()\n")
        assert terminal.finish().code == 0


def test_ctrl_c_is_raised_once_and_the_next_call_works(tmp_path: Path) -> None:
    """Ctrl-C at the terminal ends all ranks, and comes out of launch as one KeyboardInterrupt without their tracebacks."""
    path = write_script(
        tmp_path,
        """
        import os, threading, rankwise
        def wait():
            print("waiting", flush=True)
            threading.Event().wait(60)
        try:
            rankwise.launch(wait, nprocs=2)
        except KeyboardInterrupt:
            print("stopped")
        print(rankwise.launch(lambda: 1, nprocs=2))
        """,
    )
    with Terminal([sys.executable, str(path)], tmp_path) as terminal:
        wait_until(lambda: terminal.text.count("waiting") == 2, what="both ranks")
        terminal.type("\x03")
        result = terminal.finish()
    assert result.code == 0
    assert "[1, 1]" in result.out
    assert "Traceback" not in result.out
    assert "rankwise:" not in without_patience(result.out.replace("\r", ""))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "at-work"])
def test_nothing_outlives_the_caller(number: signal.Signals, is_idle: bool, tmp_path: Path) -> None:
    """A caller that is killed, between two calls or within one, takes launcher, server and ranks along."""
    wait = "threading.Event().wait(60)"
    path = write_script(
        tmp_path,
        f"""
        import threading, rankwise
        def work():
            print("here", flush=True)
            {"pass" if is_idle else wait}
        rankwise.launch(work, nprocs=2)
        print("idle", flush=True)
        {wait}
        """,
    )
    running = Running([sys.executable, str(path)], tmp_path)
    wait_until(lambda: "idle" in running.out if is_idle else running.out.count("here") == 2, what="the ranks")
    assert len(list_marked()) > 2
    running.send(number)
    assert running.finish().code == -number
    assert leftovers(wait_s=8) == []


def test_a_fork_of_the_caller_does_not_keep_the_pool(tmp_path: Path) -> None:
    """A forked child of the caller starts a pool of its own, and does not keep the caller's alive."""
    result = run_script(
        """
        import os, rankwise
        mine = rankwise.launch(os.getppid, nprocs=1)[0]
        child = os.fork()
        if not child:
            assert rankwise.launch(os.getppid, nprocs=1)[0] != mine
            rankwise.launcher.function.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(rankwise.launch(os.getppid, nprocs=1)[0] == mine)
        """,
        tmp_path,
    )
    assert result.out == "True\n"


def test_a_cold_call_works(tmp_path: Path) -> None:
    """Each rank is a fresh Python when asked for, and finds the same."""
    env = make_env({"RANKWISE_COLD": "1"})
    code = "import rankwise, sys; print(rankwise.launch(lambda: 'torch' in sys.modules, nprocs=2))"
    done = subprocess.run([*PYTHON, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[False, False]\n", "")


def test_the_callers_names_are_its_own(tmp_path: Path) -> None:
    """Whatever a script calls its globals, results come back; its classes are found by plain pickle in the ranks."""
    result = run_script(
        """
        import copy, functools, multiprocessing, pickle, sys, rankwise
        _write = io = traceback = pickle_error = sys_ = None
        class Config:
            def __init__(self, x): self.x = x
        class Step:
            def __call__(self, config):
                assert _write is io is traceback is None
                again = pickle.loads(pickle.dumps((config, self)))
                return again[0].x, not hasattr(sys.modules["__main__"], "__file__")
        def fail(config):
            raise ValueError(_write)
        print(rankwise.launch(Step(), Config(3), nprocs=1))
        print(rankwise.launch(functools.partial(lambda config: pickle.dumps(config) and config.x, Config(4)), nprocs=1))
        try:
            rankwise.launch(fail, Config(5), nprocs=1)
        except rankwise.RankFailedError as error:
            print(str(error).splitlines()[0])
        """,
        tmp_path,
    )
    assert result.out == "[(3, True)]\n[4]\n[rank 0] ValueError: None\n"


def test_closed_streams_do_not_matter(tmp_path: Path) -> None:
    """Under `>&- 2>&-` a call works, and what ranks print goes nowhere, not into our own pipes."""
    path = write_script(
        tmp_path,
        """
        import os, rankwise
        def work():
            os.system("echo loud; echo loud >&2")
            return 7
        open("found", "w").write(str([rankwise.launch(work, nprocs=2) for _ in range(2)]))
        """,
    )
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *PYTHON, str(path)]
    assert Running(closed, tmp_path).finish().code == 0
    assert (tmp_path / "found").read_text() == "[[7, 7], [7, 7]]"


def test_a_module_that_launches_at_its_import_is_told(tmp_path: Path) -> None:
    """A rank that would launch again while it looks for its function does not: the module and the remedy are named."""
    write_script(tmp_path, "import rankwise\ndef f(): return 1\nprint(rankwise.launch(f, nprocs=1))\n", "nested.py")
    result = run_script(
        "import rankwise\ntry:\n  import nested\nexcept rankwise.RankFailedError as error:\n  print(error)\n",
        tmp_path,
    )
    assert "the module 'nested' calls launch when it is imported" in result.out
    assert '__name__ == "__main__"' in result.out


def test_a_killed_callers_folder_goes(tmp_path: Path) -> None:
    """What a caller that was killed at work could not remove, the arguments among it, is removed."""
    path = write_script(
        tmp_path,
        """
        import threading, rankwise
        def work():
            print("here", flush=True)
            threading.Event().wait(60)
        rankwise.launch(work, nprocs=1)
        """,
    )
    (tmp_path / "tmp").mkdir()
    running = Running([sys.executable, str(path)], tmp_path, env={"TMPDIR": str(tmp_path / "tmp")})
    wait_until(lambda: "here" in running.out, what="the rank")
    assert list((tmp_path / "tmp").glob("rankwise_call_*/payload"))
    running.send(signal.SIGKILL)
    running.finish()
    assert leftovers(wait_s=8) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ctrl_c_at_the_start_prints_no_traceback(tmp_path: Path) -> None:
    """Whenever in the first moments of a call it comes, Ctrl-C is one KeyboardInterrupt, and nothing else is printed."""
    path = write_script(
        tmp_path,
        """
        import signal, sys, threading, rankwise
        rankwise.launch(threading.active_count, nprocs=2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for delay in range(12):
            signal.setitimer(signal.ITIMER_REAL, 0.002 + delay * 0.006)
            try:
                rankwise.launch(lambda: threading.Event().wait(60), nprocs=2)
            except KeyboardInterrupt:
                print("stopped", flush=True)
        """,
    )
    result = Running([sys.executable, str(path)], tmp_path).finish()
    assert (result.out, result.err) == ("stopped\n" * 12, "")


def test_flags_of_the_callers_python_are_the_ranks(tmp_path: Path) -> None:
    """-b, -W and -X of the caller hold in the ranks."""
    code = (
        "import rankwise, sys; print(rankwise.launch(lambda: (sys.flags.bytes_warning, sys.flags.dev_mode, "
        "'ignore::ImportWarning' in sys.warnoptions), nprocs=1))"
    )
    command = [
        sys.executable,
        "-b",
        "-X",
        "dev",
        "-W",
        "ignore::ImportWarning",
        "-W",
        "ignore::ResourceWarning",
        "-c",
        code,
    ]
    result = Running(command, tmp_path).finish()
    assert (result.out, result.err) == ("[(1, True, True)]\n", "")
