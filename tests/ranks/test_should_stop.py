"""Stopping early: a notice to any rank stops all at one step, and no child of a rank dies of it first."""

from __future__ import annotations

import faulthandler
import inspect
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise
from gloo_words import without_gloo
from rankwise import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.requeue import REQUEUE
from rankwise.runtime import child_shield
from rankwise.runtime.stopping import StopWatch
from rankwise.testing import run_ranks, try_ranks
from support import make_env, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


def test_ranks_at_different_steps_stop_at_the_same_one() -> None:
    """Ranks that run freely, far from each other, stop at one call, for one reason."""

    def program() -> tuple[int, str | None]:
        with rankwise.init() as ctx:
            num = 1
            while not ctx.should_stop():
                if ctx.rank == 1 and num == 7:
                    os.kill(os.getpid(), signal.SIGTERM)
                num += 1
        return num, ctx.stop_reason

    told = run_ranks(program, 3)
    assert len(set(told)) == 1
    assert told[0][1] == "SIGTERM on rank 1"
    assert told[0][0] > 7


def test_ranks_in_lockstep_do_not_hang() -> None:
    """With a collective in each step, and a notice to all ranks at once, nobody waits in a collective for one that has left."""

    def program() -> int:
        with rankwise.init() as ctx:
            for num in range(1, 100_000):
                total = rankwise.all_reduce(torch.ones(1))
                assert total.item() == 2
                if num == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                if ctx.should_stop():
                    rankwise.barrier()
                    return num
        return -1

    told = run_ranks(program, 2)
    assert told[0] == told[1] >= 3


def test_a_notice_before_the_first_step(tmp_path: Path) -> None:
    """A rank that listens early may have its notice while another is still in its first step: the first call waits for it."""

    def program() -> int:
        with rankwise.init() as ctx:
            if ctx.rank == 0:
                ctx.listen_for_stop()
                os.kill(os.getpid(), signal.SIGTERM)
                (tmp_path / "told").touch()
            else:
                wait_until((tmp_path / "told").exists)
            num = 1
            while not ctx.should_stop():
                num += 1
        return num

    told = run_ranks(program, 2)
    assert told[0] == told[1]


def test_ranks_that_met_at_a_file_agree_too(tmp_path: Path) -> None:
    """Without any TCP store, as with init_method file://, they agree in that file."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip

    def program() -> int:
        rank = int(os.environ["RANK"])
        for name in names:
            del os.environ[name]
        with rankwise.init(init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2) as ctx:
            num = 1
            while not ctx.should_stop():
                if num == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                num += 1
        return num

    told = run_ranks(program, 2)
    assert told[0] == told[1]


def test_a_second_notice_changes_nothing() -> None:
    """SIGTERM again, after all know and after the context is closed: the rank goes on leaving."""

    def program() -> str | None:
        with rankwise.init() as ctx:
            ctx.listen_for_stop()
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            while not ctx.should_stop():
                pass
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return ctx.stop_reason

    assert run_ranks(program, 1) == ["SIGTERM on rank 0"]
    told = run_ranks(program, 2)
    assert told[0] == told[1]


LATE = """
    import os, signal, sys, rankwise

    class Late:
        def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.NUMBER, write=os.write):
            for _ in range(3):
                kill(pid, number)
            write(1, b"through")

    ctx = rankwise.init()
    ctx.listen_for_stop()
    sys.late = Late()
    os.kill(os.getpid(), signal.NUMBER)
    assert ctx.should_stop()
    END
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("end", ["ctx.leave_for_requeue()", "sys.exit(rankwise.REQUEUE)"])
def test_a_notice_while_the_interpreter_goes_down_changes_nothing(name: str, end: str, tmp_path: Path) -> None:
    """Python gives back its handlers at its end: a signal that comes later still does not kill the rank."""
    text = textwrap.dedent(LATE).replace("NUMBER", name).replace("END", end)
    (tmp_path / "train.py").write_text(text)
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=make_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, without_gloo(result.stdout)) == (REQUEUE, "through"), result.stderr


def test_a_program_that_a_leaving_rank_starts_can_be_ended() -> None:
    """After a notice and after close() the signals are not ignored, or whatever the script starts would ignore them too."""

    def program() -> int:
        ctx = rankwise.init()
        ctx.listen_for_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ctx.should_stop()
        ctx.close()
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        return child.wait()

    assert run_ranks(program, 1) == [-signal.SIGTERM]


def test_a_second_job_of_a_process_listens_like_the_first() -> None:
    """After a job that ended by a notice the next one is told apart from it, and the script's own handler is not lost."""

    def program() -> list[Any]:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
        mine = signal.getsignal(signal.SIGTERM)
        for _ in range(2):
            with rankwise.init() as ctx:
                ctx.listen_for_stop()
                os.kill(os.getpid(), signal.SIGTERM)
                assert ctx.should_stop()
        with rankwise.init() as ctx:
            assert not ctx.should_stop()
        return [heard, signal.getsignal(signal.SIGTERM) is mine]

    assert run_ranks(program, 1) == [[[signal.SIGTERM] * 2, True]]


def test_a_deadline_stops_all() -> None:
    """One rank's time is over: all stop at one call, and say why."""

    def program() -> tuple[int, str | None]:
        with rankwise.init() as ctx:
            ctx.listen_for_stop(after_s=0.05 if ctx.rank == 1 else None)
            num = 1
            while not ctx.should_stop():
                num += 1
        return num, ctx.stop_reason

    told = run_ranks(program, 2)
    assert told[0] == told[1]
    assert told[0][1] == "0.05 s are over, on rank 1"


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    """A rank with fewer steps has left the job: the others agree without it."""

    def program() -> bool:
        ctx = rankwise.init()
        told = ctx.should_stop()
        if ctx.rank == 2:
            ctx.close()
            (tmp_path / "left").touch()
            return told
        wait_until((tmp_path / "left").exists)
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        while not told:
            told = ctx.should_stop()
        ctx.close()
        return told

    assert run_ranks(program, 3) == [True, True, False]


def test_a_rank_that_never_calls_it_is_named(tmp_path: Path) -> None:
    """The calls of the others wait as long as a collective does, and then name the silent rank."""

    def program() -> str:
        ctx = rankwise.init(timeout_s=1)
        if ctx.rank == 1:
            wait_until((tmp_path / "told").exists)
            return ""
        ctx.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)

        def wait_for_ever() -> None:
            while True:
                ctx.should_stop()

        with pytest.raises(CollectiveTimeoutError) as caught:
            wait_for_ever()
        (tmp_path / "told").touch()
        return str(caught.value)

    told = run_ranks(program, 2)[0]
    assert "[rank 0] should_stop: SIGTERM on rank 0, and after 1 s ranks [1] had not answered" in told
    assert "ranks [1] have never called it" in told


def test_a_store_that_is_gone_matters_only_with_a_notice() -> None:
    """Without the store a rank works on; with a notice it says that it can't tell the others."""

    def program() -> str:
        server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False)
        watch = StopWatch(
            rank=0, world_size=2, store=client, timeout_s=20, deadline=None, signals=(signal.SIGTERM,), clock=SYSTEM_CLOCK
        )  # fmt: skip
        wait_until(lambda: client.check(["here/0"]))
        del server
        wait_until(lambda: bool(watch._trouble))
        assert not watch.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(CollectiveError) as caught:
            watch.should_stop()
        watch.close()
        return str(caught.value)

    told = run_ranks(program, 1)[0]
    assert "[rank 0] should_stop: there is a notice to stop, but the job's store is gone" in told


def test_without_should_stop_a_signal_ends_the_rank_as_ever() -> None:
    """init() installs no handler: SIGTERM and SIGUSR1 kill, and leave their mark."""

    def program(number: int) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        with rankwise.init():
            assert signal.getsignal(number) == signal.SIG_DFL
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        assert [outcome.exit_code for outcome in try_ranks(program, 1, number)] == [-number]


def test_the_handlers_go_with_the_context() -> None:
    """After a job without a notice the script's own handlers are back."""

    def program() -> bool:
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        mine = signal.getsignal(signal.SIGTERM)
        assert before == signal.SIG_DFL
        with rankwise.init() as ctx:
            assert not ctx.should_stop()
            assert signal.getsignal(signal.SIGTERM) is not mine
        return signal.getsignal(signal.SIGTERM) is mine

    assert run_ranks(program, 2) == [True, True]


def test_a_handler_of_the_script_is_called_too() -> None:
    """A handler that was there before is called after ours, also for SIGUSR1."""

    def program() -> list[Any]:
        faulthandler.unregister(signal.SIGUSR1)
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
        with rankwise.init() as ctx:
            ctx.should_stop()
            os.kill(os.getpid(), signal.SIGUSR1)
            return [heard, ctx.should_stop(), ctx.stop_reason]

    assert run_ranks(program, 1) == [[[signal.SIGUSR1], True, "SIGUSR1 on rank 0"]]


def test_a_handler_in_native_code_is_left_alone() -> None:
    """Who shows stacks on SIGUSR1 by faulthandler.register keeps that; SIGTERM is still a notice."""

    def program() -> tuple[str | None, str]:
        with rankwise.init() as ctx:
            with redirect_stderr(io.StringIO()) as err:
                ctx.should_stop()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not ctx.should_stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert ctx.should_stop()
            return ctx.stop_reason, err.getvalue()

    reason, err = run_ranks(program, 1)[0]
    assert reason == "SIGTERM on rank 0"
    assert "SIGUSR1 has a handler in native code" in err


def test_a_notice_in_the_middle_of_a_backward() -> None:
    """The signal comes inside a backward: it goes on, with the right gradient, and the step is finished."""

    def program() -> tuple[float, bool]:
        with rankwise.init() as ctx:
            ctx.should_stop()
            weight = torch.ones(1, requires_grad=True)
            loss = 3 * weight
            loss.register_hook(lambda _grad: os.kill(os.getpid(), signal.SIGTERM))
            loss.sum().backward()
            assert weight.grad is not None
            return weight.grad.item(), ctx.should_stop()

    assert run_ranks(program, 1) == [(3.0, True)]


def test_from_another_thread_others_are_heard() -> None:
    """A first call outside the main thread can't take signals and says so; what other ranks say is heard."""

    def program() -> tuple[bool, str]:
        told = []
        with rankwise.init() as ctx, redirect_stderr(io.StringIO()) as err:

            def work() -> None:
                while not ctx.should_stop():
                    pass
                told.append(True)

            if ctx.rank == 0:
                worker = threading.Thread(target=work)
                worker.start()
                worker.join()
            else:
                ctx.listen_for_stop()
                os.kill(os.getpid(), signal.SIGTERM)
                work()
        return told == [True], err.getvalue()

    first, second = run_ranks(program, 2)
    assert first[0]
    assert "[rank 0] only the main thread can handle signals" in first[1]
    assert second[0]


@pytest.mark.parametrize("given", ["SIGUSR2", signal.SIGUSR2, int(signal.SIGUSR2)])
def test_a_notice_may_be_given_by_name_or_number(given: str | int) -> None:
    """What signals= names is a notice, in each of the forms that Python has for a signal; SIGTERM is none then."""

    def program() -> tuple[str | None, bool]:
        with rankwise.init() as ctx:
            ctx.listen_for_stop(signals=(given, given))
            os.kill(os.getpid(), signal.SIGUSR2)
            assert ctx.should_stop()
            return ctx.stop_reason, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert run_ranks(program, 1) == [("SIGUSR2 on rank 0", True)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("SIGTERM", "signals='SIGTERM' is not a tuple of signals"),
        (signal.SIGTERM, "is not a tuple of signals"),
        (None, "signals=None is not a tuple of signals"),
        (("SIGTREM",), "there is no signal 'SIGTREM'"),
        (("SIGTERM", 4711), "there is no signal 4711"),
        ((True,), "there is no signal True"),
        ((signal.SIGKILL,), "no process can handle SIGKILL"),
        ((), r"signals=\(\) names none"),
    ],
)
def test_what_is_no_signal_is_named(given: Any, told: str) -> None:
    """A wrong signals= is an error at once: nobody believes to be listening who is not; a right one may follow."""

    def program() -> None:
        with rankwise.init() as ctx:
            with pytest.raises(UsageError, match=told):
                ctx.listen_for_stop(signals=given)
            ctx.listen_for_stop()

    run_ranks(program, 1)


def test_of_several_background_errors_none_is_lost() -> None:
    """close() raises the first one; the others are its notes."""

    def program() -> list[str]:
        ctx = rankwise.init()

        def fail(text: str) -> Any:
            def wait() -> None:
                raise CollectiveError(text)

            return wait

        for text in ("one", "two", "three"):
            ctx._attend(at_step=fail(text), before_leaving=fail(text))
        with pytest.raises(CollectiveError) as caught, redirect_stderr(io.StringIO()) as err:
            ctx.close()
        notes = getattr(caught.value, "__notes__", err.getvalue().splitlines())
        return [str(caught.value), *(note.strip() for note in notes)]

    assert run_ranks(program, 1) == [["one", "and CollectiveError: two", "and CollectiveError: three"]]


def test_misuse_is_named() -> None:
    """Listening twice, and a call after close() or in a forked child, are errors that say so."""

    def program() -> None:
        with rankwise.init() as ctx:
            ctx.should_stop()
            with pytest.raises(UsageError, match="listens for notices already"):
                ctx.listen_for_stop()
            if not (child := os.fork()):
                try:
                    ctx.should_stop()
                except UsageError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(UsageError, match="has left the job"):
            ctx.should_stop()

    run_ranks(program, 1)


# ------------------------------------------------------------------- children

LOADER = """
    import os, pathlib, signal, sys, time, torch, rankwise
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self): return 1_000_000
        def __getitem__(self, index): return index

    ctx = rankwise.init()
    ctx.listen_for_stop()
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=PERSISTENT, multiprocessing_context="fork")
    for num, batch in enumerate(loader):
        if num == 3:
            pathlib.Path("up").touch()
        if ctx.should_stop():
            break
    # Workers that a signal would end are gone by now; those that live go on with their work.
    for _ in range(20):
        next(iter(loader)) if PERSISTENT else None
    print("saved", num >= 3, ctx.stop_reason, flush=True)
    END
"""


def run_loader(folder: Path, *, persistent: bool, end: str) -> tuple[int, str, str]:
    """Run the script above, signal its whole process group, and return its end."""
    text = textwrap.dedent(LOADER).replace("PERSISTENT", str(persistent)).replace("END", end)
    (folder / "train.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, env=make_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until((folder / "up").exists, 30)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, without_gloo(out), err


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_do_not_die_first(persistent: bool, tmp_path: Path) -> None:
    """SIGTERM to the whole process group: the workers serve on until the rank has saved, and end with it."""
    code, out, err = run_loader(tmp_path, persistent=persistent, end="ctx.leave_for_requeue()")
    assert (code, out) == (REQUEUE, "saved True SIGTERM on rank 0\n"), err
    assert "leaving for a requeue, with exit code 75: SIGTERM on rank 0" in err


def test_workers_end_with_a_script_that_fails(tmp_path: Path) -> None:
    """After a notice the script raises while workers live: it ends at once, with its own traceback."""
    code, out, err = run_loader(tmp_path, persistent=True, end="raise ValueError('disk full')")
    assert (code, out) == (1, "saved True SIGTERM on rank 0\n"), err
    assert "ValueError: disk full" in err


#: As a busy machine does it: the first worker is gone, and the rank has heard of that, before the second one is told to end.
ENDS_SLOWLY = """
from multiprocessing import popen_fork

def end_slowly(popen, end=popen_fork.Popen.terminate):
    end(popen)
    time.sleep(0.3)

popen_fork.Popen.terminate = end_slowly
ctx.leave_for_requeue()
"""


def test_the_end_of_a_worker_is_no_accident(tmp_path: Path) -> None:
    """A rank that leaves ends its workers one after the other: torch raises for none, and so the last is told to end, too."""
    code, _, err = run_loader(tmp_path, persistent=True, end=ENDS_SLOWLY)
    assert code == REQUEUE, err
    assert "Traceback" not in err, err


def test_children_can_be_ended_by_their_parent() -> None:
    """terminate() ends a child at any time, before, amid and after a notice; a notice to the child alone does not."""
    import multiprocessing

    context: Any = multiprocessing.get_context("fork")

    def echo(pipe: Any) -> None:
        while True:
            pipe.send(pipe.recv())

    def program() -> list[int]:
        codes = []
        ctx = rankwise.init()
        ctx.listen_for_stop()
        for moment in range(3):
            ours, theirs = context.Pipe()
            child = context.Process(target=echo, args=(theirs,), daemon=True)
            child.start()
            for word in ("up", "still there"):
                ours.send(word)
                assert ours.recv() == word
                os.kill(child.pid, signal.SIGTERM)
            ours.send("and now")
            assert ours.recv() == "and now"
            if moment == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                assert ctx.should_stop()
            if moment == 2:
                ctx.close()
            child.terminate()
            child.join(10)
            codes.append(child.exitcode)
        return codes

    assert run_ranks(program, 1) == [[-signal.SIGTERM] * 3]


def test_a_daemon_that_hangs_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shielded daemon can't run its handler: after terminate() join() returns, as it does without the shield."""
    import multiprocessing

    context: Any = multiprocessing.get_context("fork")

    def hang(pipe: Any) -> None:
        # As in native code that never comes back: a handler of Python's does not run.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pipe.send("up")
        while True:
            signal.pause()

    def program() -> list[Any]:
        monkeypatch.setattr(child_shield, "_LAST_GRACE_S", 0.2)
        ctx = rankwise.init()
        ctx.listen_for_stop()
        codes = []
        for is_daemon in (True, False):
            ours, theirs = context.Pipe()
            child = context.Process(target=hang, args=(theirs,), daemon=is_daemon)
            child.start()
            assert ours.recv() == "up"
            child.terminate()
            child.join(0.01)
            codes.append(child.exitcode)
            # One that is no daemon may have good reasons to take its time.
            child.join(None if is_daemon else 0.5)
            codes.append(child.exitcode)
            child.kill()
        return codes

    assert run_ranks(program, 1) == [[None, -signal.SIGKILL, None, None]]


def test_what_the_shield_takes_hold_of_is_there() -> None:
    """The private names of multiprocessing and torch that it wraps exist: without them workers would die of a notice again."""
    from multiprocessing import popen_fork

    from torch.utils.data._utils import signal_handling, worker

    kind: Any = popen_fork.Popen
    assert list(inspect.signature(kind._send_signal).parameters)[1:] in (["sig"], ["number"])
    assert len(inspect.signature(kind._launch).parameters) == 2
    assert list(inspect.signature(kind.wait).parameters) == ["self", "timeout"] or kind.wait.__name__ == "wait_or_kill"
    assert callable(signal_handling._set_worker_signal_handlers)
    assert worker.signal_handling is signal_handling
    assert "_set_worker_signal_handlers" in worker._worker_loop.__code__.co_names
