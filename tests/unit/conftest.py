"""Golden files for the unit tests: plain text beside the tests, written anew with ``--update-golden``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = Path(__file__).parents[1] / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option: it is known when the command names tests/unit or below (`pytest tests/unit --update-golden`)."""
    with suppress(ValueError):  # another conftest has it already
        parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with the golden file of a name."""

    def compare(name: str, text: str) -> None:
        path = _FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text + "\n", encoding="utf-8")
        assert path.exists(), f"no {path.name}: run `pytest tests/unit --update-golden` and read what it wrote"
        assert text + "\n" == path.read_text(encoding="utf-8")

    return compare
