"""Reads torch's flight recorder inside a rank: it has the collectives that C++ issues, which Python never sees.

DDP's buckets are such, and functional collectives. What it keeps is gone with the process, so its newest entries are written into
the memory file now and then. torch hands them out as a pickle, which nobody but the process itself should open. This file stands
alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from importlib import import_module
from typing import Any

_NEWEST = 256
#: cudaStreamCaptureModeThreadLocal.
_THREAD_LOCAL = 1
#: How many collectives torch keeps, by the variable's new name and its old one.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_NO_RECORDER = "this torch has no flight recorder: collectives issued from C++, such as DDP's, are not seen"
_OFF = "torch's flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0): collectives issued from C++, such as DDP's, are not seen"
#: torch's C++ names of types, where they are not Python's.
TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}


class Flight:
    """The flight recorder of this process."""

    def __init__(self, ring: Any, writer: Any, call_sites: Any) -> None:
        self._ring, self._writer, self._call_sites = ring, writer, call_sites
        native: Any = import_module("torch._C._distributed_c10d")
        # NCCL keeps what it issues in a recorder of its own, beside that of all other backends.
        self._dump, self._dump_nccl = (getattr(native, f"_dump_{name}_trace", None) for name in ("fr", "nccl"))

    def write(self) -> None:
        """Write what the flight recorder has into the memory file."""
        now_s = time.monotonic()
        found = self._read(time.time() - now_s)
        num = len(found["entries"])
        raw = json.dumps(found, separators=(",", ":")).encode()
        while len(raw) > self._ring.get_room("flight") and num > 1:
            num //= 2
            found["entries"] = found["entries"][-num:]
            raw = json.dumps(found, separators=(",", ":")).encode()
        if len(raw) <= self._ring.get_room("flight"):
            self._writer.report("flight", raw, now_s)

    def write_failure(self, error: Exception) -> None:
        """Write down that the flight recorder can't be read; what it has told before is no longer sure."""
        body = {"entries": [], "missing": [f"torch's flight recorder can't be read: {error!r}"[:500]]}
        self._writer.report("flight", json.dumps(body).encode(), time.monotonic())

    def _read(self, offset_s: float) -> dict[str, Any]:
        if self._dump is None and self._dump_nccl is None:
            return {"entries": [], "missing": [_NO_RECORDER]}
        entries = [] if self._dump is None else _load(self._dump)
        if self._dump_nccl is not None and (self._dump is None or sys.modules["torch"].cuda.is_initialized()):
            with _CaptureGuard():
                entries = sorted([*entries, *_load(self._dump_nccl)], key=lambda one: int(one["time_created_ns"]))
        missing = [_OFF] if not entries and _is_switched_off() else []
        chosen = [one for one in entries[-_NEWEST:] if not one.get("is_p2p")]
        return {"entries": [self._shorten(one, offset_s) for one in chosen], "missing": missing}

    def _shorten(self, one: dict[str, Any], offset_s: float) -> dict[str, Any]:
        backend, _, name = str(one["profiling_name"]).partition(":")
        site, inside = self._call_sites.describe(one.get("frames") or [])
        return {
            "group": str(one["process_group"][0]),
            "backend": backend,
            "name": name,
            "seq": one["collective_seq_id"],
            "shapes": one.get("input_sizes") or [],
            "dtypes": [TYPES.get(kind.lower(), kind.lower()) for kind in one.get("input_dtypes") or []],
            "over": bool(one.get("retired")) or one.get("state") == "completed",
            "site": site,
            "inside": inside,
            "at_s": one["time_created_ns"] / 1e9 - offset_s,
        }


class _CaptureGuard:
    """Lets this thread ask the GPU for the state of events while another one captures a CUDA graph.

    NCCL's recorder looks whether collectives are over as it is read. By default CUDA refuses that to all threads as
    long as one captures, and the capture fails. torch's own watchdog goes through the same door.
    """

    def __init__(self) -> None:
        self._exchange: Any = None

    def __enter__(self) -> None:
        import ctypes

        # torch has loaded CUDA's library for all; one that is built otherwise does without.
        exchange = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)
        if exchange is not None and sys.modules["torch"].cuda.is_initialized():
            self._mode = ctypes.c_int(_THREAD_LOCAL)
            exchange(ctypes.byref(self._mode))  # and gives back the mode before
            self._exchange = lambda: exchange(ctypes.byref(self._mode))

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange()


def _load(dump: Any) -> list[dict[str, Any]]:
    """Return what a recorder has; each entry is made into Python's objects, as nobody can ask for the newest alone."""
    entries: Any = pickle.loads(_dump_with_frames(dump)).get("entries")  # noqa: S301 - made by this very process
    return list(entries or ())


def _is_switched_off() -> bool:
    """Whether the environment tells torch to keep nothing: what it hands out is then as empty as before the first collective."""
    found = next((os.environ[name] for name in SIZES if name in os.environ), "")
    return found.strip().isdecimal() and int(found) == 0


def _dump_with_frames(dump: Any) -> Any:
    """Return the flight recorder's pickle, without the import of torch's compiler that it would begin: that takes a second.

    To name the lines of compiled code torch looks for ``torch._inductor``, which is imported when somebody looks for
    it. Where nobody has so far, something else stands there for as long as the lock of the interpreter is ours: no
    bytecode runs between, and no collector, so no other thread can see it.
    """
    torch: Any = sys.modules["torch"]
    has_lock = getattr(sys, "_is_gil_enabled", bool)  # only a Python without that lock says no
    if "_inductor" in vars(torch):
        return dump(True, True, False)
    if has_lock is not bool and not has_lock():
        return dump(True, False, False)
    was_enabled = gc.isenabled()
    gc.disable()
    vars(torch)["_inductor"] = None
    try:
        return dump(True, True, False)
    finally:
        del vars(torch)["_inductor"]
        if was_enabled:
            gc.enable()
