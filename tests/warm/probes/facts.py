# ruff: noqa: ANN001, ANN201, E402, PTH109, PTH208, TID252
"""A script that writes down all that it can see of its own process, as JSON, one file for each rank."""

import gc

FROZEN = gc.get_freeze_count()

import atexit
import ctypes
import faulthandler
import json
import locale
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path


class Mine:
    """Pickled by its name in __main__."""


noted: int = 0


def list_descriptors():
    """Return what is open: numbers, kinds and flags; pipes and files of a job have no lasting names."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status, inheritable = os.fstat(int(name)), os.get_inheritable(int(name))
            lines = Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()
        except OSError:
            continue
        flags = next(line.split()[1] for line in lines if line.startswith("flags"))
        found[name] = [oct(status.st_mode & 0o170000), flags, inheritable]
    return found


def list_streams():
    """Return each attribute of a standard stream that a script might look at."""
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = stream.buffer
        raw = getattr(buffer, "raw", buffer)
        found[f"{name} text"] = [
            stream.encoding, stream.errors, stream.newlines, stream.line_buffering, stream.write_through, stream.name,
            stream.mode, stream.isatty(), stream.fileno(), stream.readable(), stream.writable(),
        ]  # fmt: skip
        found[f"{name} raw"] = [type(buffer).__name__, type(raw).__name__, raw.mode, raw.closefd, raw.name]
    return found


def list_signals():
    names = sorted(number for number in signal.valid_signals() if isinstance(number, signal.Signals))
    return {number.name: str(signal.getsignal(number)) for number in names}


def read_status():
    """Return the lines of /proc/self/status that are settings, not counters."""
    wanted = ("Name", "Umask", "Tracer", "Uid", "Gid", "Groups", "SigB", "SigI", "SigC", "Shd", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed",
              "Mems_allowed", "CoreDumping", "THP_enabled")  # fmt: skip
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split(":")[1].split() for line in lines if line.startswith(wanted)}
    # glibc's own two, which it catches as soon as there is a second thread.
    found["SigCgt"] = hex(int(found["SigCgt"][0], 16) & ~(0b11 << 31))
    return found


def describe(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Some libffi keeps its own file open from the first callback on, which an import of torch makes.
ctypes.CFUNCTYPE(None)(print)
main = sys.modules["__main__"]
facts = {
    # What Python knows of the script.
    "main names": sorted(name for name in vars(main) if name.startswith("__")),
    "main file": main.__dict__.get("__file__"),
    "main spec": re.sub("0x[0-9a-f]+", "", str(__spec__)),
    "main loader": describe(__loader__),
    "main loader path": getattr(__loader__, "path", None),
    "main package": __package__,
    "main doc": __doc__,
    "main annotations": str(main.__annotations__),  # from Python 3.14 on, no global name
    "main builtins": describe(__builtins__),
    "main cached": main.__dict__.get("__cached__"),
    "main is globals": vars(main) is globals(),
    "main repr": repr(main),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "executable": [sys.executable, sys._base_executable, sys.prefix, sys.base_prefix, sys.exec_prefix],
    "xoptions": [sys._xoptions, sys.warnoptions],
    "frames": [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
              sys.unraisablehook is sys.__unraisablehook__, sys.breakpointhook is sys.__breakpointhook__,
              sys.gettrace() is None, sys.getprofile() is None, threading.gettrace() is None],
    "limits of python": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(), sys.dont_write_bytecode,
                         sys.pycache_prefix, sys.get_int_max_str_digits(), str(sys.get_asyncgen_hooks())],
    # The pybind11 of torch 2.8 keeps there what its modules share, from the first import of one on.
    "builtins": sorted(name for name in dir(__builtins__) if not name.startswith("__pybind11_internals_")),
    "meta path": [str(getattr(finder, "__name__", describe(finder))) for finder in sys.meta_path],
    "sitecustomize": [sorted(name for name in sys.modules if "customize" in name or name.startswith("rankwise"))],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
    "faulthandler": faulthandler.is_enabled(),
    "main thread": [threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
                    threading.current_thread() is threading.main_thread(), threading.active_count(), threading.main_thread().name],
    # What the system knows of the process.
    "cmdline": Path("/proc/self/cmdline").read_text().split("\0"),
    "comm": Path("/proc/self/comm").read_text(),
    "status": read_status(),
    "cwd": os.getcwd(),
    "nice": os.nice(0),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
    "descriptors": list_descriptors(),
    "leads": [os.getpid() == os.getsid(0), os.getpid() == os.getpgid(0)],
    "affinity": sorted(os.sched_getaffinity(0)),
    "scheduler": [os.sched_getscheduler(0), Path("/proc/self/oom_score_adj").read_text(), Path("/proc/self/timerslack_ns").read_text(),
                  Path("/proc/self/coredump_filter").read_text(), Path("/proc/self/personality").read_text()],
    "locale": [locale.getlocale(), locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding()],
    "signals": list_signals(),
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "wakeup": signal.set_wakeup_fd(-1),
    "timers": signal.getitimer(signal.ITIMER_REAL),
    "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "terminal": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4],
    "streams": list_streams(),
    "next descriptor": [os.dup(0), os.dup(0)],
    "time zone": [time.tzname, time.timezone],
    "environment": dict(os.environ),
    "initial environment": {
        name: value
        for name, _, value in (entry.partition("=") for entry in Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0"))
        if not name.startswith(("RANKWISE_", "PYTHONPATH"))  # what makes Python import the recorder
    },
    "number of modules": len(sys.modules),
    "hash": hash("text"),
    "pickled": pickle.loads(pickle.dumps(Mine)) is Mine,
    "atexit": atexit._ncallbacks(),
    "cpu": time.process_time() < 60,
}  # fmt: skip


libc, number = ctypes.CDLL(None), ctypes.c_int(-1)
libc.prctl(2, ctypes.byref(number), 0, 0, 0)
libc.getenv.restype = ctypes.c_char_p
for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "ODD", "PYTHONPATH"):
    facts[f"environment of C/{name}"] = str(libc.getenv(name.encode()))
facts["parent dies"] = number.value

# ---------------------------------------------------------------- with torch
import dataclasses
import inspect
import logging
import multiprocessing
import random
import tempfile
import uuid
import warnings

import numpy as np
import torch
import torch.distributed as dist


@dataclasses.dataclass
class Point:
    x: int = 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of Python 3.14

    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def list_threads():
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))


try:
    from . import sibling  # as `python -m` only

    relative = [sibling.NAME, sibling.__name__]
except ImportError as error:
    relative = str(error)

facts |= {
    "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "threads of the system": list_threads(),
    "default": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                torch.backends.mkldnn.is_available(), torch.__config__.parallel_info()],
    "signals with torch": list_signals() | {"faulthandler": str(faulthandler.is_enabled())},
    "affinity with torch": sorted(os.sched_getaffinity(0)),
    "warnings": [str(entry) for entry in warnings.filters],
    "meta path with torch": [str(getattr(finder, "__name__", describe(finder))) for finder in sys.meta_path],
    "path with torch": sys.path,
    "environment with torch": dict(os.environ),
    "loggers": [logging.root.level, [describe(handler) for handler in logging.root.handlers], logging.lastResort.level],
    "multiprocessing": [multiprocessing.get_start_method(), multiprocessing.current_process().name, multiprocessing.parent_process() is None,
                        len(multiprocessing.active_children()), main is sys.modules.get("__mp_main__")],
    "dataclass": [repr(Point()), Point.__module__, inspect.getsource(Point), inspect.getsourcefile(Point)],
    "scripted": double(torch.ones(1)).item(),
    "relative": relative,
    "locale with torch": locale.setlocale(locale.LC_ALL),
    "float": [np.float32(1) / np.float32(3) == np.float32(1 / 3), torch.get_float32_matmul_precision()],
}  # fmt: skip
drawn = {
    "torch": torch.initial_seed(),
    "torch number": torch.rand(1).item(),
    "numpy": np.random.rand(),
    "numpy new": np.random.default_rng().random(),
    "random": random.random(),
    "uuid": str(uuid.uuid4()),
    "tempfile": next(tempfile._get_candidate_names()),
    "system": os.urandom(8).hex(),
    "authkey": multiprocessing.current_process().authkey.hex(),
}
torch.manual_seed(7), np.random.seed(7), random.seed(7)
facts["seeded"] = [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]

# As a real training does: a product on all threads, a gradient, and numbers between the ranks.
weight = torch.ones(300, 300, requires_grad=True)
(weight @ torch.ones(300, 300)).sum().backward()
np.ones((300, 300)) @ np.ones((300, 300))
facts["gradient"] = weight.grad.sum().item()
facts["threads that calculate"] = len([name for name in list_threads() if not name.startswith("pt_autograd")])
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
facts["reduced"] = total.item()
dist.destroy_process_group()
facts["stdin"] = sys.stdin.readline() if os.environ["RANK"] == "0" and "READS" in os.environ else ""

Path(os.environ["DUMP_TO"], os.environ["RANK"] + ".json").write_text(
    json.dumps({"facts": facts, "drawn": drawn, "frozen": FROZEN}, default=str)
)
