"""Messages of the library: on standard error by default, and elsewhere if the user says so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from rankwise.base.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The logger ``rankwise`` as nobody has touched it; afterwards it is as it was."""
    logger = logging.getLogger("rankwise")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_messages_are_on_standard_error(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one line that says whose it is, and a warning says so; also where the root logger has a handler of its own."""
    logger = get_logger("rankwise.runtime.stopping")
    get_logger("rankwise.train")
    logger.info("100 % of it")
    logger.warning("a warning")
    assert root.handlers
    assert capsys.readouterr().err == "rankwise: 100 % of it\nrankwise: warning: a warning\n"


def test_the_user_routes_them(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """A handler and a level that the user has set are kept, and nothing is written to standard error."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logger = get_logger("rankwise.data.workers")
    logger.info("silenced")
    logger.warning("routed")
    assert [(record.name, record.getMessage()) for record in records] == [("rankwise.data.workers", "routed")]
    assert capsys.readouterr().err == ""


def test_a_handler_that_comes_later_takes_over(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Modules make their loggers when they are imported, before a script can route anything."""
    records: list[logging.LogRecord] = []
    logger = get_logger("rankwise.data.workers")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root.addHandler(handler)
    logger.warning("routed")
    assert [record.getMessage() for record in records] == ["routed"]
    assert capsys.readouterr().err == ""
