"""One host's part of an all-reduce over several hosts: tells, as one line of JSON, how fast it was and who was waited for.

Started by itself, as ``python all_reduce_process.py NAME=VALUE...``: the names are torchrun's (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), BACKEND, and RANKS: how many ranks this host has, of which RANK is the first one. With LIFELINE=1 it ends as soon as its
standard input does. What is not given is taken from the environment.
"""

import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

del sys.path[0]  # our own folder: its names must not shadow anybody's

# The answer leaves through a private descriptor: whatever a library prints goes to standard error.
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

_RENDEZVOUS_S, _REDUCING_S, _ALL_S = 25, 25, 55.0
_SMALL_ROUNDS, _LARGE_ROUNDS = 21, 5
_LARGE_BYTES, _PILOT_BYTES, _LONGEST_S = 32 << 20, 1 << 20, 1.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Leave nothing behind when whoever started us is killed (Linux)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def die_with_input() -> None:
    """Leave nothing behind when whoever holds our standard input ends, in whichever way, on any system."""

    def wait_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(1)

    threading.Thread(target=wait_end, daemon=True).start()


def run_ranks(first: int, count: int) -> list[dict[str, Any]]:
    """Start this host's ranks, a process each, and return what they tell."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BACKEND")
    given = [f"{name}={os.environ[name]}" for name in names]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *given, f"RANK={first + index}", f"LOCAL_RANK={index}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    until_s = time.monotonic() + _ALL_S
    parts: list[dict[str, Any]] = []
    for one in ranks:
        try:
            out, err = one.communicate(timeout=max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            out, err = one.communicate()
            err += f"\nno end within {_ALL_S:.0f} s"
        lines = out.strip().splitlines()
        parts += json.loads(lines[-1])["ranks"] if lines else [{"why": (err.strip().splitlines() or ["no word"])[-1]}]
    return parts


def run_rank() -> dict[str, Any]:
    """Reduce, and tell how it went."""
    try:
        import torch
        import torch.distributed as dist

        return _measure(torch, dist)
    except Exception as error:  # noqa: BLE001 - what breaks here breaks a job, and that is the answer
        lines = str(error).strip().splitlines() or [""]
        return {"rank": int(os.environ["RANK"]), "why": f"{type(error).__name__}: {lines[0]}"[:500]}


def _measure(torch: Any, dist: Any) -> dict[str, Any]:
    backend = os.environ.get("BACKEND", "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=_RENDEZVOUS_S + _REDUCING_S))

    def reduce(tensor: Any) -> float:
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    small = torch.zeros(1, device=device)
    reduce(small)
    latency_s = statistics.median(reduce(small) for _ in range(_SMALL_ROUNDS))
    pilot = torch.zeros(_PILOT_BYTES // 4, device=device)
    reduce(pilot)
    pilot_s = torch.tensor([reduce(pilot)], device=device)
    dist.all_reduce(pilot_s, op=dist.ReduceOp.MAX)  # all ranks must come to the same size
    size_bytes = _LARGE_BYTES
    while size_bytes > _PILOT_BYTES and size_bytes / _PILOT_BYTES * float(pilot_s) > _LONGEST_S:
        size_bytes //= 2
    large = torch.zeros(size_bytes // 4, device=device)
    took_s = statistics.median(reduce(large) for _ in range(_LARGE_ROUNDS))
    waited_s = _find_wait(torch, dist, device, reduce)
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return {
        "rank": int(os.environ["RANK"]), "latency_s": latency_s, "bytes_per_s": size_bytes / max(took_s, 1e-9), "size_bytes": size_bytes,
        "waited_s": waited_s,
    }  # fmt: skip


def _find_wait(torch: Any, dist: Any, device: Any, reduce: Any) -> float:
    """Return for how long the others waited for this rank, after each had done the same work; the median over the rounds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    one, late = torch.zeros(1, device=device), []
    for _ in range(_LARGE_ROUNDS):
        torch.rand(512, 512, device=device) @ torch.rand(512, 512, device=device)
        own = torch.tensor([reduce(one)], device=device)
        waits = [torch.zeros_like(own) for _ in range(world)]
        dist.all_gather(waits, own)
        lines = [float(wait) for wait in waits]
        others = [wait for index, wait in enumerate(lines) if index != rank]
        late.append(max(0.0, statistics.median(others) - lines[rank]) if lines[rank] == min(lines) and others else 0.0)
    return statistics.median(late)


def main() -> None:
    """Read the arguments, run, answer."""
    die_with_parent()
    os.environ.update(dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument))
    if os.environ.get("LIFELINE") == "1":
        die_with_input()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    count = int(os.environ.pop("RANKS", "1"))
    ranks = [run_rank()] if count == 1 else run_ranks(int(os.environ["RANK"]), count)
    _answers.write(json.dumps({"ranks": ranks}) + "\n")
    _answers.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # a group whose other side is gone must not keep us
