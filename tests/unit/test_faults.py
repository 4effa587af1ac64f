"""torchelastic's error files: what torch writes we read, what we write torch reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from rankwise.base.faults import FaultRecord, parse_fault, read_fault

if TYPE_CHECKING:
    from pathlib import Path

_TORCH = """
import json, os, sys
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure
folder = sys.argv[1]
os.environ["TORCHELASTIC_ERROR_FILE"] = folder + "/theirs.json"
try:
    raise ValueError("boom")
except ValueError as error:
    ErrorHandler().record_exception(error)
failure = ProcessFailure(local_rank=1, pid=2, exitcode=3, error_file=folder + "/ours.json")
os.environ["TORCHELASTIC_ERROR_FILE"] = folder + "/parent.json"
ErrorHandler().dump_error_file(folder + "/ours.json", 7)
print(json.dumps({"message": failure.message, "timestamp": failure.timestamp}))
"""
_OURS = FaultRecord(message="KeyError: 'x'", callstack="Traceback\n  caf\u00e9\n", timestamp_s=1_700_000_000.9)


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Let torch write one error file, and read one of ours."""
    folder = tmp_path_factory.mktemp("errors")
    (folder / "ours.json").write_text(_OURS.to_json())
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _TORCH, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, json.loads(done.stdout)


def test_what_torch_writes_we_read(exchanged: tuple[Path, dict[str, Any]]) -> None:
    """Message, traceback and time of @record's file arrive."""
    fault = read_fault(exchanged[0] / "theirs.json")
    assert fault is not None
    assert fault.message == "ValueError: boom"
    assert 'raise ValueError("boom")' in fault.callstack or "ValueError: boom" in fault.callstack
    assert fault.timestamp_s > 1_000_000_000


def test_what_we_write_torch_reads(exchanged: tuple[Path, dict[str, Any]]) -> None:
    """Torch takes our file for one of its own."""
    told = exchanged[1]
    assert told["message"]["message"] == "KeyError: 'x'"
    assert told["message"]["extraInfo"]["py_callstack"] == "Traceback\n  caf\u00e9\n"
    assert told["timestamp"] == 1_700_000_000


def test_what_torch_passes_on_we_write_alike(exchanged: tuple[Path, dict[str, Any]]) -> None:
    """A parent's error file with an exit code has the same form from both."""
    assert json.loads((exchanged[0] / "parent.json").read_text()) == json.loads(_OURS.to_json(error_code=7))


def test_the_old_form_is_read() -> None:
    """A message that is a plain string, as torchelastic once wrote."""
    assert parse_fault('{"message": "boom"}') == FaultRecord(message="boom")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", "null", '"x"', "{}", '{"message": 5}', '{"message": null}', '{"message": []}'],
)
def test_other_texts_are_no_fault(text: str) -> None:
    """Half a file, or another file, is None and no error."""
    assert parse_fault(text) is None


@pytest.mark.parametrize("extra", [None, 5, [], {}, {"timestamp": None}, {"timestamp": "x"}, {"py_callstack": None}])
def test_a_strange_extra_loses_no_message(extra: object) -> None:
    """The message is read whatever stands beside it."""
    fault = parse_fault(json.dumps({"message": {"message": "boom", "extraInfo": extra}}))
    assert fault is not None
    assert fault.message == "boom"


@given(
    message=st.text(),
    callstack=st.text(),
    seconds=st.integers(0, 1 << 40),
    code=st.none() | st.integers(-64, 255),
)
def test_a_fault_survives_its_file(message: str, callstack: str, seconds: int, code: int | None) -> None:
    """Whatever stands in an error is read back as it was."""
    fault = FaultRecord(message=message, callstack=callstack, timestamp_s=float(seconds))
    assert parse_fault(fault.to_json(code)) == fault


def test_a_missing_file_is_none(tmp_path: Path) -> None:
    """A rank that was killed leaves none."""
    assert read_fault(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    assert read_fault(tmp_path / "bad.json") is None
