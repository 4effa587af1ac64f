"""What a rank notes of the exception that ends it.

PYTEST_DONT_REWRITE: an assertion here has no words of pytest's.
"""

from __future__ import annotations

import pytest

from rankwise.evidence.in_rank import recorder


def _check(path: str) -> None:
    assert path.startswith("/data")


def _fail() -> None:
    raise RuntimeError("\n        Failed to run stage backward:\n        Stage output: (4, 16)\n")


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda: _check("/mnt"), 'AssertionError: assert path.startswith("/data")'),
        (_fail, "RuntimeError: Failed to run stage backward:"),
    ],
)
def test_the_first_line_of_an_error_says_something(call: object, first: str) -> None:
    """Of an assertion without words its line is told, and empty lines in front of a text are not."""
    assert callable(call)
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        call()
    message = recorder._describe(caught.value, caught.value.__traceback__)["message"]
    assert message.splitlines()[0] == first
