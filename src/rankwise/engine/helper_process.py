"""Do what the parent needs torch for: count devices, bind to NUMA nodes, serve ranks' timers, meet the other nodes of a job.

Requests and answers are JSON lines on standard input and output, each answer with its request's number; a request without
one gets none. ``{"waiting": n}`` is sent unasked when other nodes want to join, and so is what other nodes' launchers tell of
their ranks. It ends when its input ends. The rendezvous is torch's own, unchanged, so that nodes started by torchrun and
nodes started by us meet in one job.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Only the parent decides when it goes. Slurm, which sends its notice to all processes of a job, would take the
    # rendezvous away while ranks still save.
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, _name):
            signal.signal(getattr(signal, _name), signal.SIG_IGN)
del sys.path[0]  # our own folder: its names must not shadow anybody's

# Answers leave through a private descriptor: whatever a library prints goes to standard error.
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
_lock = threading.Lock()
# A store that is not reached, or that another node has taken away with it, is told in a line of ours, not in a stack of
# C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def _say(answer: dict[str, Any]) -> None:
    with _lock:
        _answers.write(json.dumps(answer) + "\n")
        _answers.flush()


@cache
def _load_beside(name: str) -> Any:
    """Load a file of this folder: the package may not be there for the ranks' Python."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"no {name}.py beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Desk:
    """Where requests are dealt with, each by the method of its name; those that are none of these are the rendezvous's, or the exchange's."""

    def __init__(self) -> None:
        self._job: Any = None

    def count(self, what: str) -> dict[str, Any]:
        """Count as torchrun does for ``--nproc-per-node gpu | cpu | auto | xpu | <a backend's name>``."""
        from torch.distributed.run import determine_local_world_size

        return {"count": int(determine_local_world_size(what))}

    def numa(self, mode: str, num_ranks: int) -> dict[str, Any]:
        """Return for each local rank the words that stand before its command, as torchrun would put them."""
        import logging

        from torch.numa import binding

        # It logs a traceback before it raises the same; the parent says it in a line.
        logging.getLogger(binding.__name__).setLevel(logging.CRITICAL + 1)
        # Private, and the only way to torchrun's answer: without it the parent says that torch is too old.
        wrap = binding._maybe_wrap_command_args_with_numa_binding
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        ranks = range(num_ranks)
        return {"prefixes": [list(wrap((), gpu_index=index, numa_options=options)) for index in ranks]}

    def serve_timers(self, path: str, run_id: str) -> dict[str, Any]:
        """Serve the timers of torch.distributed.elastic.timer, as torchrun does; tell the parent who was killed, and for which."""
        from torch.distributed.elastic.timer import FileTimerServer

        expired: dict[str, str] = {}

        class Server(FileTimerServer):  # type: ignore[misc]
            def _reap_worker(self, worker_pid: int, signal: int) -> bool:
                # Behind each rank it would end its own process, with torchrun: here the parent takes care of the
                # others.
                return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))

        def tell(event: str, timer: Any) -> None:
            if event == "timer expired" and timer.signal > 0:
                expired[str(timer.worker_pid)] = timer.scope_id
                _say({"expired": expired})

        Server(file_path=path, run_id=run_id, max_interval=0.1, daemon=True, log_event=tell).start()
        return {}

    def open(self, **orders: Any) -> dict[str, Any]:
        _load_beside("store_process").import_stores("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        self._job = _load_beside("job_rendezvous").JobRendezvous(orders, _say, _load_beside)
        self._job.watch()
        return {"note": self._job.note}

    def settle(self, bound_s: float) -> dict[str, Any]:
        if (members := self._met().members) is not None:
            members.settle(bound_s)
        return {}

    def find(self, op: str) -> Any:
        """Return what deals with a request: a method here, of the job's rendezvous, or of what is exchanged with other nodes."""
        if op in vars(Desk):
            return getattr(self, op)
        if op in vars(type(self._met())):
            return getattr(self._job, op)
        if self._job.exchange is None:
            raise RuntimeError("nothing is exchanged with other nodes")
        return getattr(self._job.exchange, op)

    def _met(self) -> Any:
        if self._job is None:
            raise RuntimeError("no rendezvous is open")
        return self._job


def _describe(error: BaseException) -> str:
    """Return an error in a line, and the one that it refers to as the inner exception."""
    what = str(error) or type(error).__doc__ or ""  # torch's own errors may have no text but this
    text = f"{type(error).__name__}: {what}".partition("\n")[0]
    refers, inner = " See inner exception for details.", error.__cause__
    return text.replace(refers, f" {_describe(inner)}") if inner is not None else text


def main() -> None:
    """Serve requests until the parent closes our input."""
    desk = Desk()

    def serve(line: str) -> None:
        request = json.loads(line)
        number = request.pop("number", None)
        try:
            answer = desk.find(request.pop("op"))(**request)
            answer = {"text": answer} if isinstance(answer, str) else answer or {}
        except BaseException as error:  # noqa: BLE001 - the parent is told whatever it was
            answer = {"error": _describe(error)}
        if number is not None:
            _say({"answer": answer, "number": number})

    # A request may block for minutes: the end of the input must be seen meanwhile.
    for line in sys.stdin:
        threading.Thread(target=serve, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
