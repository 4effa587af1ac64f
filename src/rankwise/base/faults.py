"""What a dying rank leaves: error.json, in torchelastic's schema, so that either side reads the other's.

The writer in the rank is evidence/in_rank/rank_exit.py, or torch's own ``@record``; the schema is
``{"message": {"message": str, "extraInfo": {"py_callstack": str, "timestamp": str}}}``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """An exception that nobody caught.

    Attributes:
        message: ``ValueError: boom``.
        callstack: The traceback as Python prints it.
        timestamp_s: Seconds since the epoch.
        monotonic_s: The same moment on the host's monotonic clock; None when the writer did not know it.
        where: ``file.py:LINE`` of the innermost line of the user's own code.
        module: Name of the innermost module of torch that it came through, in the outermost one; None if unknown.
    """

    message: str
    callstack: str = ""
    timestamp_s: float = 0.0
    monotonic_s: float | None = None
    where: str | None = None
    module: str | None = None

    def to_json(self, error_code: int | None = None) -> str:
        """Return the text of an error file, with the exit code if there is one to tell."""
        message: dict[str, object] = {
            "message": self.message,
            "extraInfo": {"py_callstack": self.callstack, "timestamp": str(int(self.timestamp_s))},
        }
        if error_code is not None:
            message["errorCode"] = error_code
        return json.dumps({"message": message})


def parse_fault(text: str) -> FaultRecord | None:
    """Read the text of an error file, in the present or the old form; None if it is neither."""
    try:
        body = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(body, str):
        return FaultRecord(message=body)
    if not isinstance(body, dict):
        return None
    extra = body.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    record = FaultRecord(message=str(body.get("message", "")), callstack=str(extra.get("py_callstack", "")))
    try:
        return replace(record, timestamp_s=float(extra.get("timestamp", 0)))
    except (TypeError, ValueError):
        return record


def read_fault(path: str | Path) -> FaultRecord | None:
    """Read an error file; None if it is absent, empty or not an error file."""
    try:
        return parse_fault(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def is_failure(error: BaseException | None) -> bool:
    """Whether a process that ends by this exception has failed: SystemExit without a code is none."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def find_last_error() -> BaseException | None:
    """Return the exception that ends the interpreter, for functions of atexit; None if there is none, or it is SystemExit."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
