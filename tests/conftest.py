"""What all tests share: no test of the launcher leaves a process behind."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import sys
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with suppress(ImportError):  # not where the tests that need a GPU are run with what is there
    from hypothesis import HealthCheck, settings

    # How fast examples are drawn is the machine's affair, and it may be busy.
    settings.register_profile("rankwise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("rankwise")

if TYPE_CHECKING:
    from collections.abc import Iterator

# torch's TCPStore asks the resolver for a name at each connection (getnameinfo of ::ffff:127.0.0.1); where that drops
# queries, glibc would wait 5 s for each. Inherited by all processes that tests start.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# Ranks without a launcher have a thread for each core, as their users' have; several tests at once leave these no core, and
# a thread that waits for one that has none would spin its time away. Inherited, too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where it is set, Python writes a line and its end apart, and lines of two ranks mix. Users' machines do not set it.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell starts what it runs in the background with SIGINT ignored, and all processes that tests start would inherit that:
# those that are about Ctrl-C could not pass.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SOURCE = Path(__file__).parents[1] / "src" / "rankwise"
_REAL_PROCESSES = ("cluster", "gpu", "launch", "nodes", "warm")
#: Not in tests/warm, which is about the import of torch; nor in tests/nodes, where each host is a namespace of its own, which no
#: server serves from outside.
_RESIDENT = ("contracts", "examples", "launch")
#: Folders whose tests last for seconds each, those that last longest first.
_DEAR = ("cluster", "nodes", "warm", "contracts", "launch", "examples", "numerics", "ranks")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know our settings also where pytest-timeout is not installed: the tests that need a GPU are run where one is, with what is there."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "unused: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Register our markers."""
    # Where PYTHONDONTWRITEBYTECODE is set, pytest would rewrite the asserts of all test files in each worker and run: nine seconds.
    sys.dont_write_bytecode = False
    config.addinivalue_line("markers", "linux: needs /proc, prctl or pseudo-terminals; skipped elsewhere")
    config.addinivalue_line("markers", "leaves_processes: leaves a process behind on purpose")
    config.addinivalue_line("markers", "own_server: its launchers import torch by themselves, as users' first runs do")
    config.addinivalue_line(
        "markers", "shared_server: its launchers use the session's servers, though others of its folder can't"
    )
    config.addinivalue_line("markers", "checked: its launchers check their scripts, as they do by default")
    if sys.platform.startswith("linux"):
        import accounting

        config.pluginmanager.register(accounting.Accounting())
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and what is started here would, too
    if not hasattr(config, "workerinput"):
        # Hundreds of launchers and ranks start below. Where PYTHONDONTWRITEBYTECODE is set, each of them would compile
        # the package anew, which takes a launcher longer than all else that it does.
        compileall.compile_dir(_SOURCE, quiet=1)
        import support

        config.add_cleanup(support.stop_residents)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector off the tests and what they import: a million objects that stay, and each collection would look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Take apart what a failed test leaves open in its traceback: else the garbage collector does in a later test, which then fails too."""
    failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed:
        for name in ("last_exc", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what only Linux can do; with several workers the dear tests go first, so that all of these are busy to the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((number for number, name in enumerate(_DEAR) if name in item.path.parts), len(_DEAR)))  # fmt: skip
    for item in items:
        if "linux" in item.keywords and not sys.platform.startswith("linux"):
            item.add_marker(pytest.mark.skip(reason="Linux only"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Take back what a test, or a library that it imports (accelerate sets variables), has changed in the environment."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of the launcher that leaves a process behind, unless it says so."""
    folders = request.node.path.parts
    if sys.platform.startswith("linux"):
        import huge_pages
        import support

        huge_pages.gather_forkserver()
        has_own = request.node.get_closest_marker("own_server") is not None
        may_share = request.node.get_closest_marker("shared_server") is not None
        support.set_resident(not has_own and (may_share or any(name in folders for name in _RESIDENT)))
    if not sys.platform.startswith("linux") or not any(name in folders for name in _REAL_PROCESSES):
        yield
        return
    import support

    marker = uuid.uuid4().hex
    support.set_marker(marker)
    support.set_checked(request.node.get_closest_marker("checked") is not None)
    yield
    if request.node.get_closest_marker("leaves_processes"):
        support.kill_leftovers(marker)
        return
    left = support.leftovers(marker)
    support.kill_leftovers(marker)
    assert not left, f"left behind: {left}"
