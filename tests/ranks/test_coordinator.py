"""Functions scheduled on workers: each is done once, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import rankwise
from rankwise.testing import run_ranks, try_ranks


def play(behave: Any, functions: dict[str, Any], timeout_s: float = 20.0) -> Any:
    """A server, a coordinator that behaves, and workers that find functions by name, as in a script that all ranks run."""
    torch.set_num_threads(1)
    script = ModuleType("the_script")
    for name, function in functions.items():
        function.__module__, function.__qualname__ = "the_script", name
        setattr(script, name, function)
    sys.modules["the_script"] = script
    ctx = rankwise.init(device="cpu")
    torch.manual_seed(0)
    script.model = nn.Linear(3, 1)  # type: ignore[attr-defined]
    script.ps = rankwise.parameter_server(  # type: ignore[attr-defined]
        script.model,
        lambda ones: torch.optim.SGD(ones, lr=0.05),
        mode="async",
        coordinator=True,
        timeout_s=timeout_s,
    )
    ps = script.ps  # type: ignore[attr-defined]
    if ps.is_server:
        return ps.serve()
    result = behave(ps, script) if ps.is_coordinator else ps.work()
    ctx.close()
    return result


def step(number: int, batches: Any) -> tuple[int, int, float]:
    script = sys.modules["the_script"]
    script.ps.pull()
    loss = (script.model(next(batches)) - 1).square().mean()
    loss.backward()
    script.ps.push()
    return number, os.getpid(), loss.item()


def make_batches(index: int, num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(index)
    while True:
        yield torch.rand(4, 3, generator=generator) + num_workers * 0


def train(ps: Any, script: Any) -> Any:
    batches = ps.per_worker(script.make_batches)
    handles = [ps.schedule(script.step, (number, batches)) for number in range(40)]
    ps.join()
    return [ps.fetch(one) for one in handles], [one.num_runs for one in handles]


def test_scheduled_steps_train() -> None:
    """Each function is called once, more than one worker does some, and the loss falls."""
    report, (results, runs), *called = run_ranks(play, 4, train, {"step": step, "make_batches": make_batches})
    assert [number for number, *_ in results] == list(range(40))
    assert set(runs) == {1}
    assert sum(called) == 40
    assert min(called) > 0
    assert report["shards"][0]["applied"] == 40
    assert results[-1][2] < 0.2 * results[0][2]


def die_once(number: int, place: str) -> int:
    """The first worker that reaches number 7 is killed in it."""
    if number == 7 and not Path(place).exists():
        Path(place).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def stop_once(number: int, place: str) -> int:
    if number == 7 and not Path(place).exists():
        Path(place).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return number * number


def square_all(place: str) -> Any:
    def behave(ps: Any, script: Any) -> Any:
        handles = [ps.schedule(script.square, (number, place)) for number in range(30)]
        values = [ps.fetch(one) for one in handles]
        if frozen := Path(place).read_text():
            os.kill(int(frozen), signal.SIGKILL)
        return values, [one.num_runs for one in handles]

    return behave


def test_what_a_killed_worker_had_begun_is_done_by_another(tmp_path: Any) -> None:
    """All results are there, once each, and only that one was begun twice."""
    outcomes = try_ranks(play, 4, square_all(str(tmp_path / "dead")), {"square": die_once}, grace_s=60)
    values, runs = outcomes[1].value
    assert values == [number * number for number in range(30)]
    assert runs == [2 if number == 7 else 1 for number in range(30)]
    assert sorted(outcome.exit_code for outcome in outcomes if outcome.exit_code) == [-signal.SIGKILL]


def test_what_a_frozen_worker_had_begun_is_done_by_another(tmp_path: Any) -> None:
    """After timeout_s; and what the frozen one may say later is not taken."""
    outcomes = try_ranks(play, 4, square_all(str(tmp_path / "frozen")), {"square": stop_once}, 2.0, grace_s=60)
    values, runs = outcomes[1].value
    assert values == [number * number for number in range(30)]
    assert runs[7] == 2


def test_without_workers_the_coordinator_says_who_was_lost(tmp_path: Any) -> None:
    """The only worker is killed: fetch ends with its name."""
    outcomes = try_ranks(play, 3, square_all(str(tmp_path / "dead")), {"square": die_once}, grace_s=60)
    assert isinstance(outcomes[1].error, rankwise.CollectiveError)
    assert "no worker is left for scheduled function 7: rank 2" in str(outcomes[1].error)


def fail(number: int) -> int:
    return 1 // (number - 3)


class Unreadable:
    """Fails where it is read, and not where it is sent."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def give_unreadable() -> Any:
    return Unreadable()


def read_unreadable(ps: Any, script: Any) -> Any:
    told = []
    ps.schedule(script.give_unreadable)
    try:
        ps.join()
    except rankwise.RankFailedError as error:
        told.append(str(error))
    return *told, ps.fetch(ps.schedule(script.fail, (4,)))


def test_an_answer_that_cannot_be_read_is_an_error_and_the_rest_goes_on() -> None:
    """join() raises what went wrong with whose answer, and the worker does what comes next."""
    functions = {"fail": fail, "give_unreadable": give_unreadable}
    told, value = run_ranks(play, 3, read_unreadable, functions)[1]
    assert "scheduled function 0 returned on rank 2 can't be read here: ValueError" in told
    assert value == 1


def collect_errors(ps: Any, script: Any) -> list[str]:
    told = []
    for _ in range(10):
        ps.schedule(script.fail, (3,))
    for call in (ps.join, lambda: ps.schedule(lambda: 1)):
        try:
            call()
        except rankwise.RankwiseError as error:
            told.append(f"{type(error).__name__}: {error}")
    told.append(str(ps.fetch(ps.schedule(script.fail, (4,)))))
    return told


def test_a_function_that_raises_is_told_and_the_rest_goes_on() -> None:
    """join() raises its traceback, lambdas are refused with what to do, and then functions run again."""
    raised, refused, value = run_ranks(play, 3, collect_errors, {"fail": fail})[1]
    first = "RankFailedError: [rank 2] scheduled function 0 raised on rank 2: ZeroDivisionError: integer "
    assert raised.startswith(first)  # a report shows the first line only
    assert "in fail" in raised
    assert "top of the script" in refused
    assert value == "1"
