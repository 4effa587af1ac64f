# ruff: noqa: ANN001, ANN201, ANN202, ANN204, PLW0108
"""A script that ends in another way at each attempt, and leaves much to do to the interpreter's exit."""

import asyncio
import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

if "torch" in os.environ.get("NEVER", ""):
    import torch  # noqa: F401 - what a warm start is for; the endings themselves need none of it

ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("frozen" if gc.get_freeze_count() > 1000 else "fresh", file=sys.__stdout__)


atexit.register(print, "registered first")
atexit.register(print, "registered last")


def fail_in_thread():
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    raise KeyError("after the thread") from OSError(2, "cause")


def fail_with_hook():
    def hook(kind, error, traceback):
        print("hook", kind.__name__, error, traceback.tb_frame.f_code.co_name, traceback.tb_next.tb_lineno)
        sys.__excepthook__(kind, error, traceback)

    sys.excepthook = hook
    threading.excepthook = lambda args: print("thread hook", args.exc_type.__name__, args.thread.name)
    fail_in_thread()


def fail_deeply():
    def deeper(number):
        return deeper(number + 1)

    deeper(0)


def fail_with_group():
    if sys.version_info < (3, 11):
        raise ValueError("there are no groups yet")
    error = ExceptionGroup("several", [ValueError(1), TypeError("two")])  # noqa: F821
    error.add_note("a note")
    raise error


def warn():
    warnings.warn("look out", stacklevel=1)
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    for _ in range(2):
        warnings.warn("once", UserWarning, stacklevel=1)
    Path(__file__).open()  # noqa: SIM115 - a ResourceWarning, if shown

    class Bad:
        def __del__(self):
            raise RuntimeError("unraisable")

    Bad()
    sys.exit(7)


def outlive():
    def work():
        time.sleep(0.05)
        print("thread is done", threading.main_thread().is_alive())

    threading.Thread(target=work).start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    sys.exit(8)


def run_loop():
    async def main():
        def on_signal():
            print("signal in the loop")
            done.set()

        done = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, on_signal)
        os.kill(os.getpid(), signal.SIGUSR1)
        await done.wait()
        process = await asyncio.create_subprocess_exec("sh", "-c", "echo out; exit 9", stdout=-1)
        out = await process.communicate()
        print(out, process.returncode)
        await asyncio.to_thread(print, "in a thread")
        raise ConnectionError("of the loop")

    asyncio.run(main())


def rename():
    ctypes.CDLL(None).prctl(15, b"trainer", 0, 0, 0)
    print(Path("/proc/self/comm").read_text())
    sys.exit(10)


def crash():
    faulthandler.enable()
    ctypes.string_at(0)


def handle():
    def leave(number, frame):
        print("handled", number, frame.f_code.co_name)
        sys.exit(11)

    signal.signal(signal.SIGTERM, leave)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def alarm():
    signal.signal(signal.SIGALRM, lambda *_: os._exit(12))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()


ENDINGS = [
    lambda: sys.exit(3),
    lambda: sys.exit("a text"),
    lambda: os._exit(4),
    lambda: exec("raise ValueError('from a text')"),
    lambda: compile("a b", "other.py", "exec"),
    lambda: os.kill(os.getpid(), signal.SIGTERM),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    fail_in_thread,
    fail_with_hook,
    fail_deeply,
    fail_with_group,
    warn,
    outlive,
    run_loop,
    rename,
    crash,
    handle,
    interrupt,
    alarm,
    lambda: os.abort(),
    lambda: input("prompt: "),
    lambda: print("good"),
]

if __name__ == "__main__":
    ENDINGS[ATTEMPT]()
