"""What a thread is handling is told without running a line of the script's."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from rankwise.evidence.in_rank import handled_exceptions


def _raise(error: BaseException) -> None:
    raise error


def _tell(error: BaseException) -> dict[str, Any]:
    try:
        _raise(error)
    except type(error):
        return handled_exceptions.list_handled()[threading.get_ident()]
    raise AssertionError("nothing was raised")


class _OwnError(RuntimeError):
    """Runs code of the script's wherever it can."""

    args = property(lambda _: 1 / 0)  # type: ignore[assignment]
    __traceback__ = property(lambda _: 1 / 0)  # type: ignore[assignment]

    def __str__(self) -> str:
        raise AssertionError("it was asked for its text")

    __repr__ = __str__


class _Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise AssertionError("it was asked for its text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("no such file"), "ValueError: no such file"),
        (FileNotFoundError(2, "No such file or directory"), "FileNotFoundError: [Errno 2] No such file or directory"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("a", 3, None), "RuntimeError: ('a', 3, None)"),
        (IndexError([1]), "IndexError: <list>"),
        (ValueError(10**9000), "ValueError: <int>"),
        (ValueError(_Text("x")), "ValueError: <_Text>"),
        (_OwnError("mine"), f"{__name__}._OwnError: mine"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (json.JSONDecodeError("bad", "doc", 0), "json.decoder.JSONDecodeError: bad: line 1 column 1 (char 0)"),
    ],
)  # fmt: skip
def test_an_exception_is_told_by_its_plain_arguments(error: BaseException, message: str) -> None:
    """Never by its own text: that may be anything, and may wait for other ranks."""
    assert _tell(error)["message"] == message


def test_what_is_told_is_bounded() -> None:
    """A huge message, and a recursion that was too deep, are cut; first and last lines stay."""

    def dive(depth: int) -> None:
        if not depth:
            raise ValueError("x" * 10**6)
        dive(depth - 1)

    try:
        dive(200)
    except ValueError:
        told = handled_exceptions.list_handled()[threading.get_ident()]
    assert len(told["message"]) < 1000
    assert len(told["frames"]) == 30
    assert told["frames"][0][2] == "test_what_is_told_is_bounded"
    assert told["frames"][-1][2] == "dive"


def test_only_what_is_on_hand_is_told() -> None:
    """In a finally and in an __exit__ there is an exception on hand; in one that is reached without any, and afterwards, there is none."""
    seen: list[bool] = []

    class Scope:
        def __enter__(self) -> None:
            return

        def __exit__(self, *_: object) -> bool:
            seen.append(threading.get_ident() in handled_exceptions.list_handled())
            return True

    def clean(*, fails: bool) -> None:
        try:
            if fails:
                raise KeyError("x")
        finally:
            seen.append(threading.get_ident() in handled_exceptions.list_handled())

    with Scope():
        clean(fails=True)
    clean(fails=False)
    with Scope():
        pass
    assert seen == [True, True, False, False]
