# ruff: noqa: ANN001, ANN201, ANN204, PTH208
"""A script whose processes have processes: everything that a library may do with multiprocessing."""

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path


class Item:
    """Pickled by its name in __main__."""

    def __init__(self, value):
        self.value = value


def work(item):
    return [
        item.value + 1,
        type(item).__module__,
        multiprocessing.current_process().name.rstrip("0123456789"),
    ]


def look(_):
    """Return what a child sees."""
    names = [name for name in os.environ if name.startswith("RANKWISE")]
    seen = [entry for entry in sys.path if "hook" in entry]
    thread = threading.main_thread()
    descriptors = max(map(int, os.listdir("/proc/self/fd"))) < 90
    return {"environment": names, "path": seen, "argv": sys.argv, "flags": subprocess._args_from_interpreter_flags(),
            "pythonpath": os.environ.get("PYTHONPATH"), "rank": os.environ["RANK"], "thread": thread.native_id == os.getpid(),
            "descriptors": descriptors, "torch": "torch" in sys.modules}  # fmt: skip


def add(queue, number):
    queue.put(number)


def use_shared(name):
    memory = shared_memory.SharedMemory(name)
    memory.buf[0] += 1
    memory.close()


def main():
    facts = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            facts[f"{method} pool"] = pool.map(work, [Item(1), Item(2), Item(3)], chunksize=1)
            facts[f"{method} sees"] = pool.map(look, [0])[0]
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            facts[f"{method} executor"] = list(executor.map(work, [Item(4)]))
            try:
                executor.submit(int, "no number").result()
            except ValueError as error:
                facts[f"{method} error"] = [str(error), "RemoteTraceback" in str(type(error.__cause__))]
        queue = context.Queue()
        process = context.Process(target=add, args=(queue, 5))
        process.start()
        facts[f"{method} queue"] = queue.get(timeout=30)
        process.join()
        process = context.Process(target=sys.exit, args=(6,))
        process.start()
        process.join()
        facts[f"{method} exit code"] = process.exitcode
    with multiprocessing.Manager() as manager:
        shared = manager.dict(a=1)
        process = multiprocessing.Process(target=shared.update, args=({"b": 2},))
        process.start()
        process.join()
        facts["manager"] = dict(shared)
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.buf[0] = 1
    process = multiprocessing.get_context("spawn").Process(target=use_shared, args=(memory.name,))
    process.start()
    process.join()
    facts["shared memory"] = memory.buf[0]
    memory.close()
    memory.unlink()
    return facts


if __name__ == "__main__":
    if os.environ.get("NEVER"):
        import torch  # noqa: F401 - what a warm start is for; the children need none of it
    found = main()
    Path(os.environ["DUMP_TO"], os.environ["RANK"] + ".json").write_text(json.dumps(found))
