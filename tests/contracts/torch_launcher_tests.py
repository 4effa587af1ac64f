"""torch's own tests of its launcher and its agent, run against ``rankwise run``: a control set that nobody here has written.

They are read from a checkout of PyTorch, and never copied here:

    git clone --depth 1 --filter=blob:none --sparse --branch v2.13.0 https://github.com/pytorch/pytorch
    git -C pytorch sparse-checkout set test/distributed
    pip install expecttest
    python tests/contracts/torch_launcher_tests.py pytorch            # torchrun and rankwise, side by side
    python tests/contracts/torch_launcher_tests.py pytorch -k elastic # what else pytest takes

Inside the tests ``torch.distributed.run.main``, ``launch_agent`` and ``LocalElasticAgent`` stand for the command line: an adapter turns
what they are given into flags. Functions that agents are to run are called by a script. Tests that replace parts of torch's agent by
mocks say nothing of another launcher, and are left out by name. Where python-etcd and etcd are not installed, c10d takes their place.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Below test/distributed; in releases before 2.14 test_api.py is called api_test.py.
FILES = (
    "launcher/test_run.py",
    "launcher/launch_test.py",
    "launcher/api_test.py",
    "elastic/agent/server/test/local_elastic_agent_test.py",
)
_BOUND_S = 120
_MOCKS = "replaces parts of torch's agent by mocks"
_ADDRESS = "gives the agent another master address by its Python interface; the command line has no such flag for etcd"
_HEALTH = "asks for a health check server, which torch itself has as an empty class"
_OLD_MODULE = "has --use-env of the deprecated torch.distributed.launch, which torchrun refuses, too"
_COUNTS = "replaces torch.cuda in this process; a launcher is another one"
#: Parts of names, and why these tests are left out for both.
LEFT_OUT = {
    "test_launch_elastic_agent_raise_exception": _MOCKS,
    "test_launch_elastic_worker_raise_exception": "counts torch's own events by a mock, behind what the launcher does",
    "test_launch_shutdown": _MOCKS,
    "test_rdzv_handler_shutdown": _MOCKS,
    "test_barrier_failed": _MOCKS,
    "test_shutdown_called": _MOCKS,
    "test_launch_agent_": _MOCKS,
    "test_is_torchelastic_launched_with_logs_spec_defined": "replaces Python's entry points by mocks in this process",
    "test_check_master_addr_port_override": _ADDRESS,
    "healthcheck_setup": _HEALTH,
    "test_nproc_gpu_launch": _COUNTS,
    "test_nproc_xpu_launch": _COUNTS,
    "test_virtual_local_rank": "needs two GPUs",
    "api_test.py::ElasticLaunchTest::test_launch_elastic_multiple_agents": "starts its second agent in an interpreter without the adapter",
    "launch_test.py::LaunchTest::test_launch_with_env": _OLD_MODULE,
    "launch_test.py::LaunchTest::test_launch_without_env": _OLD_MODULE,
}
_CALL = """\
import importlib.util, json, os, pickle, sys
told, folder = json.loads(sys.argv[1]), sys.argv[2]
spec = importlib.util.spec_from_file_location(told["module"], told["file"])
module = sys.modules[told["module"]] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
value = getattr(module, told["function"])(*told["arguments"])
with open(os.path.join(folder, os.environ["RANK"] + ".pickle"), "wb") as file:
    pickle.dump(value, file)
"""
#: Where launches leave their logs, for tests that read them.
_FOLDER = "TORCH_LAUNCHER_TESTS_FOLDER"


# ---------------------------------------------------------------- the command line


def _run(words: Sequence[str], **more: Any) -> int:
    """Run the launcher to its end; it goes with the process that stands for an agent."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)

    command = [sys.executable, "-m", "rankwise", "run", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, check=False, env=env, preexec_fn=die_with_parent, stdout=subprocess.PIPE, text=True, **more
    )
    sys.stdout.write(done.stdout)
    return done.returncode


def main_of_run(args: Sequence[str] | None = None) -> None:
    """Stand for ``torch.distributed.run.main``: a wrong command is a ValueError there, a failed rank a ChildFailedError."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    code = _run(list(args if args is not None else sys.argv[1:]))
    if code == 2:
        raise ValueError("rankwise run refused the command")
    if code:
        raise ChildFailedError("rankwise run", {})


class Launch:
    """One launch by flags, of a program or of a function."""

    def __init__(self, flags: list[str], entrypoint: Any, args: Sequence[Any]) -> None:
        self._flags, self._entrypoint, self._args = flags, entrypoint, args

    def run(self) -> Any:
        """Run it, and return what torch's agent would: a RunResult."""
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        folder = Path(tempfile.mkdtemp(dir=os.environ[_FOLDER]))
        code = _run(
            [
                *self._flags,
                "--log-dir",
                str(folder / "logs"),
                "--report",
                str(folder / "report.json"),
                *self._write(folder),
            ]
        )
        if code == 0:
            values = {int(path.stem): pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        report = json.loads((folder / "report.json").read_text())
        return RunResult(state=WorkerState.FAILED, failures=_read_failures(report, folder / "logs"))

    def _write(self, folder: Path) -> list[str]:
        if not callable(self._entrypoint):
            return ["--no-python", self._entrypoint, *map(str, self._args)]
        script, function = folder / "call.py", self._entrypoint
        script.write_text(_CALL)
        told = {
            "module": function.__module__,
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "arguments": self._args,
        }
        return [str(script), json.dumps(told), str(folder)]


def _read_failures(report: dict[str, Any], logs: Path) -> dict[int, Any]:
    """Return what failed first, in torch's form."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    exits = {int(rank): code for rank, code in report["exits"].items() if code}
    blamed = [rank for rank in report["culprits"] if rank in exits] or sorted(exits)
    last = max(logs.glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]), default=logs)
    return {
        rank: ProcessFailure(local_rank=rank, pid=0, exitcode=exits[rank], error_file=str(last / str(rank) / "error.json"))
        for rank in blamed
    }  # fmt: skip


def launch_agent(config: Any, entrypoint: Any, args: Sequence[Any], **_more: Any) -> dict[int, Any]:
    """Stand for torch's function of that name."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    run_id = config.run_id or uuid.uuid4().hex
    flags = _meet(
        config.rdzv_backend,
        config.rdzv_endpoint,
        run_id,
        config.min_nodes,
        config.max_nodes,
        config.rdzv_configs,
    )
    flags += ["--nproc-per-node", str(config.nproc_per_node), "--max-restarts", str(config.max_restarts)]
    result = Launch(flags, entrypoint, args).run()
    if result.is_failed():
        raise ChildFailedError("rankwise run", result.failures)
    return dict(result.return_values)


def _meet(backend: str, endpoint: str, run_id: str, low: int, high: int, conf: dict[str, Any]) -> list[str]:
    flags = ["--nnodes", f"{low}:{high}", "--rdzv-id", run_id]
    if backend == "static":
        host, _, port = endpoint.rpartition(":")
        return [*flags, "--node-rank", str(conf["rank"]), "--master-addr", host, "--master-port", port]
    if backend.startswith("etcd") and not _has_etcd():
        backend = "c10d"
    flags += ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
    told = {name: value for name, value in conf.items() if name != "is_host"}
    # A job of one to two nodes waits half a minute for the second unless it is told otherwise, as torch's agent does.
    return [*flags, "--rdzv-conf", ",".join(f"{name}={value}" for name, value in told.items())] if told else flags


class CommandAgent:
    """Stands for ``LocalElasticAgent``."""

    def __init__(self, spec: Any, logs_specs: Any, log_line_prefix_template: str | None = None, **_more: Any) -> None:
        told = spec.rdzv_handler.told
        flags = _meet(told.backend, told.endpoint, told.run_id, told.min_nodes, told.max_nodes, {})
        flags += [
            "--nproc-per-node",
            str(spec.local_world_size),
            "--max-restarts",
            str(spec.max_restarts),
            "--role",
            spec.role,
        ]
        for flag, value in (("--redirects", logs_specs._redirects), ("--tee", logs_specs._tee)):
            if isinstance(value, int) and int(value):
                flags += [flag, str(int(value))]
        if log_line_prefix_template:
            flags += ["--log-line-prefix-template", log_line_prefix_template]
        self._launch, self._max_restarts = Launch(flags, spec.entrypoint, spec.args), spec.max_restarts
        self._remaining_restarts, self._total_execution_time, self._state = spec.max_restarts, 0, ""

    def run(self, _role: str = "default") -> Any:
        """Run it to its end."""
        result = self._launch.run()
        self._state, self._total_execution_time = result.state, 1
        if result.is_failed():
            self._remaining_restarts = 0
        return result

    def get_worker_group(self) -> Any:
        """Return what tells the state."""
        return argparse.Namespace(state=self._state)


# ---------------------------------------------------------------- pytest


class Plugin:
    """Puts the adapter in torch's place, and leaves out what says nothing of a launcher.

    Args:
        is_ours: Whether the launcher is rankwise; else torchrun, unchanged.
    """

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_configure(self) -> None:
        """Replace before any of the tests is imported."""
        import torch.distributed.launch
        import torch.distributed.run
        from torch.distributed.elastic.agent.server import local_elastic_agent
        from torch.distributed.elastic.rendezvous import etcd_server, registry
        from torch.distributed.launcher import api

        self._remember_parameters(registry)
        if not _has_etcd():
            etcd_server.EtcdServer = _NoEtcd
        if self._is_ours:
            torch.distributed.run.main = torch.distributed.launch.main = main_of_run
            api.launch_agent = launch_agent
            local_elastic_agent.LocalElasticAgent = CommandAgent

    @staticmethod
    def _remember_parameters(registry: Any) -> None:
        original: Callable[[Any], Any] = registry.get_rendezvous_handler

        def get_rendezvous_handler(told: Any) -> Any:
            if told.backend.startswith("etcd") and not _has_etcd():
                told.backend = "c10d"
            handler = original(told)
            handler.told = told
            return handler

        registry.get_rendezvous_handler = get_rendezvous_handler

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark what is left out."""
        names = {item.name for item in items}
        for item in items:
            why = next((why for name, why in LEFT_OUT.items() if name in item.nodeid), None)
            if not _has_etcd() and "_etcd" in item.name and f"{item.name.partition('_etcd')[0]}_c10d" in names:
                why = "needs etcd; its twin runs with c10d"
            if not _has_etcd() and "fault_tolerance" in item.name:
                why = "needs etcd; with c10d the store may go with the agent that is killed"
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        """End a test that hangs."""

        def give_up(_number: int, _frame: object) -> None:
            raise TimeoutError(f"not through after {_BOUND_S} s")

        before = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(_BOUND_S)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
            if report.failed:
                self.failed.append(report.nodeid.rpartition("/")[2])


class _NoEtcd:
    """In the place of an etcd: an endpoint for c10d."""

    def start(self, *_: Any, **__: Any) -> None:
        """Nothing is to be started: a launcher serves the store."""

    def stop(self) -> None:
        """Nothing is to be stopped."""

    @staticmethod
    def get_endpoint() -> str:
        """Return a place that nobody uses."""
        from torch.distributed.elastic.utils.distributed import get_free_port

        return f"localhost:{get_free_port()}"


def _has_etcd() -> bool:
    return importlib.util.find_spec("etcd") is not None and shutil.which("etcd") is not None


def _run_one(sources: Path, more: Sequence[str], *, is_ours: bool) -> int:
    os.environ.pop("PYTEST_ADDOPTS", None)
    files = [str(path) for name in FILES if (path := sources / "test" / "distributed" / name).exists()]
    if not files:
        sys.exit(f"{sources} holds none of torch's tests: {', '.join(FILES)} are looked for below test/distributed")
    os.chdir(sources / "test")  # no configuration of ours
    plugin = Plugin(is_ours=is_ours)
    flags = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--no-header",
        "-rN",
        "--tb=short",
        "-c",
        os.devnull,
        f"--rootdir={sources}",
    ]
    pytest.main([*flags, *files, *more], plugins=[plugin])
    counts = ", ".join(f"{count} {what}" for what, count in sorted(plugin.counts.items()))
    sys.stdout.write(
        f"{'rankwise run' if is_ours else 'torchrun'}: {counts}\n"
        + "".join(f"  failed: {name}\n" for name in plugin.failed)
    )
    return len(plugin.failed)


def main() -> int:
    """Run the tests with torchrun, then with rankwise: each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a checkout of PyTorch")
    parser.add_argument("--only", choices=("torchrun", "rankwise"), help="one of the two")
    args, more = parser.parse_known_args()
    if args.only:
        with tempfile.TemporaryDirectory() as folder:
            os.environ[_FOLDER] = folder
            return _run_one(args.sources.resolve(), more, is_ours=args.only == "rankwise")
    this = [sys.executable, __file__, str(args.sources)]
    theirs = subprocess.run([*this, "--only", "torchrun", *more], check=False).returncode
    ours = subprocess.run([*this, "--only", "rankwise", *more], check=False).returncode
    return int(ours > theirs)


if __name__ == "__main__":
    sys.exit(main())
