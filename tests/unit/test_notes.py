"""What a rank's recorder wrote, read in the parent: exceptions, ends and stacks of all Pythons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from rankwise.base.faults import FaultRecord, parse_fault
from rankwise.base.files import read_all
from rankwise.evidence.in_rank import rank_exit
from rankwise.evidence.reader.notes import (
    Ending,
    Frame,
    Stack,
    parse_stack,
    read_notes,
    split_crash,
)

if TYPE_CHECKING:
    from pathlib import Path

_FRAMES = '  File "/home/u/model.py", line 5 in forward\n  File "/home/u/train.py", line 9 in <module>\n'
_OTHER = '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
_EXTENSIONS = "\nExtension modules: numpy.core._multiarray_umath, torch._C (total: 2)\n"
_C_STACK = (
    "\nCurrent thread's C stack trace (most recent call first):\n"
    '  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x31 [0x5]\n  Binary file "libc.so.6", at +0x45330 [0x7]\n'
)
#: faulthandler's texts, by the Python that wrote them.
TEXTS = {
    "3.10 crash": f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f01 (most recent call first):\n{_FRAMES}",
    "3.11 crash": f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f01 (most recent call first):\n{_FRAMES}{_EXTENSIONS}",
    "3.11 abort with threads": f"Fatal Python error: Aborted\n\nThread 0x00007f02 (most recent call first):\n{_OTHER}\n"
    f"Current thread 0x00007f01 (most recent call first):\n{_FRAMES}{_EXTENSIONS}",
    "3.12 dump": f"Thread 0x00007f02 (most recent call first):\n{_OTHER}\nCurrent thread 0x00007f01 (most recent call first):\n{_FRAMES}",
    "3.13 collecting": f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f01 (most recent call first):\n  Garbage-collecting\n{_FRAMES}",
    "3.14 crash": "Fatal Python error: Segmentation fault\n\nThread 0x00007f02 [pt_autograd_0] (most recent call first):\n"
    f"{_OTHER}\nCurrent thread 0x00007f01 [python] (most recent call first):\n{_FRAMES}{_C_STACK}{_EXTENSIONS}",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_main_threads_stack_is_read(text: str) -> None:
    """Of every Python's text the main thread's frames are taken, innermost first."""
    stack = parse_stack(text)
    assert stack == Stack(
        frames=(
            Frame(file="/home/u/model.py", line=5, function="forward"),
            Frame(file="/home/u/train.py", line=9, function="<module>"),
        )
    )
    assert stack is not None
    assert stack.where == "/home/u/model.py:5"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "Current thread 0x01 (most recent call first):\n  <no Python frame>\n",
        _EXTENSIONS,
        _C_STACK,
    ],
)
def test_no_frame_is_no_stack(text: str) -> None:
    """A text without a frame is None, not an empty stack."""
    assert parse_stack(text) is None


def test_a_text_that_is_cut_short_is_read_as_far_as_it_goes() -> None:
    """A dying process may not finish its text."""
    for length in range(len(TEXTS["3.14 crash"])):
        parse_stack(TEXTS["3.14 crash"][:length])
    whole = TEXTS["3.10 crash"]
    stack = parse_stack(whole[: whole.index("train.py")])
    assert stack is not None
    assert stack.where == "/home/u/model.py:5"


def test_asked_and_crashed_stacks_are_kept_apart() -> None:
    """What was asked for stands before what the crash wrote."""
    asked, crash = split_crash(TEXTS["3.12 dump"] + TEXTS["3.11 crash"])
    assert (asked, crash) == (TEXTS["3.12 dump"], TEXTS["3.11 crash"])
    assert split_crash(TEXTS["3.12 dump"]) == (TEXTS["3.12 dump"], "")


def test_the_users_line_is_found_below_the_libraries() -> None:
    """The innermost line of the user's own code is the place; torch's function below it is the operation."""
    torch = "/env/lib/python3.12/site-packages/torch/distributed/"
    text = (
        "Current thread 0x1 (most recent call first):\n"
        f'  File "{torch}distributed_c10d.py", line 3000 in all_reduce\n'
        f'  File "{torch}c10d_logger.py", line 81 in wrapper\n'
        '  File "/home/u/train.py", line 9 in main\n  File "/home/u/train.py", line 12 in <module>\n'
    )
    stack = parse_stack(text)
    assert stack is not None
    assert (stack.where, stack.op) == ("/home/u/train.py:9", "all_reduce")


#: A rank that uses what an all-reduce of tensor parallelism has not filled yet.
FILLING = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/env/site-packages/torch/_ops.py", line 1350 in __call__\n'
    '  File "/env/site-packages/torch/distributed/_functional_collectives.py", line 143 in wait_tensor\n'
    '  File "/env/site-packages/torch/utils/_pytree.py", line 1776 in tree_map_only\n'
    '  File "/env/site-packages/torch/distributed/_functional_collectives.py", line 1280 in __torch_dispatch__\n'
    '  File "/home/u/train.py", line 12 in <module>\n'
)
_STEP_OF_TF = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/env/site-packages/rankwise/runtime/control.py", line 245 in _wait\n'
    '  File "/env/site-packages/rankwise/runtime/reductions.py", line 102 in all_reduce_\n'
    '  File "/env/site-packages/rankwise/tf/mirroring.py", line 175 in optimizer_step\n'
    '  File "/env/site-packages/torch/optim/optimizer.py", line 557 in wrapper\n'
    '  File "/home/u/train.py", line 12 in <module>\n'
)


#: A framework's loop: the optimizer's step calls the closure that computes the gradients.
_CLOSURE = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/env/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward\n'
    '  File "/env/site-packages/torch/_tensor.py", line 623 in backward\n'
    '  File "/env/site-packages/lightning/fabric/plugins/precision/precision.py", line 130 in backward\n'
    '  File "/env/site-packages/torch/optim/optimizer.py", line 80 in _use_grad\n'
    '  File "/env/site-packages/lightning/pytorch/trainer/trainer.py", line 612 in fit\n'
    '  File "/home/u/train.py", line 12 in <module>\n'
)


@pytest.mark.parametrize(
    ("text", "op"),
    [(FILLING, "wait_tensor"), (_STEP_OF_TF, "rankwise.tf.optimizer_step"), (_CLOSURE, "backward")],
)
def test_a_wait_has_a_name_that_users_know(text: str, op: str) -> None:
    """No hook's and no special method's name: that of what is waited for."""
    stack = parse_stack(text)
    assert stack is not None
    assert (stack.where, stack.op) == ("/home/u/train.py:12", op)


def test_a_stack_of_libraries_only_has_a_place_too() -> None:
    """Without a line of the user's the innermost line is the place."""
    stack = parse_stack(f"Current thread 0x1 (most recent call first):\n{_OTHER}")
    assert stack is not None
    assert stack.where == "/usr/lib/python3.11/threading.py:324"


_NOTE = {
    "note": "exception",
    "monotonic_s": 3.5,
    "time_s": 1e9,
    "message": "ValueError: x",
    "traceback": "T",
    "where": "a.py:1",
}


def _read_end(text: str) -> tuple[FaultRecord | None, float | None]:
    notes = read_notes(text)
    return notes.fault, notes.finished_s


def test_notes_are_read() -> None:
    """An exception comes back with its place and both its times; a finished script with its moment."""
    fault, finished_s = _read_end(json.dumps(_NOTE) + "\n")
    assert fault is not None
    assert (fault.message, fault.callstack, fault.where) == ("ValueError: x", "T", "a.py:1")
    assert (fault.monotonic_s, fault.timestamp_s, finished_s) == (3.5, 1e9, None)
    assert _read_end('{"note": "finished", "monotonic_s": 2}\n') == (None, 2.0)
    assert _read_end("") == (None, None)


@given(st.integers(0, 200))
def test_a_note_cut_short_is_no_note(length: int) -> None:
    """The rank died while it wrote: the line is dropped, the lines before it stand."""
    line = json.dumps(_NOTE)
    fault, finished_s = _read_end('{"note": "finished", "monotonic_s": 2}\n' + line[: min(length, len(line) - 1)])
    assert (fault, finished_s) == (None, 2.0)


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", '"x"', "{}", '{"note": "new kind"}', '{"note": "exception"}', "\x00\xff"]
)
def test_strange_lines_are_skipped(line: str) -> None:
    """A script may have written into the descriptor: that is no note."""
    assert _read_end(line + '\n{"note": "finished", "monotonic_s": 2}\n') == (None, 2.0)


def test_a_memory_file_is_read_without_moving_it(tmp_path: Path) -> None:
    """The rank goes on writing where it was."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, "caf\u00e9 \n".encode() + b"\xff")
        assert read_all(fd) == "caf\u00e9 \n\ufffd"
        assert os.lseek(fd, 0, os.SEEK_CUR) == 8
    finally:
        os.close(fd)


_ARM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("r", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.arm(notes={notes!r}, stacks={stacks!r}, stack_signal=None, lifeline=None)
{code}
"""


def _run_recorded(folder: Path, code: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    notes, stacks = folder / "notes", folder / "stacks"
    script = folder / "train.py"
    script.write_text(_ARM.format(path=rank_exit.__file__, notes=str(notes), stacks=str(stacks), code=code))
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=30, check=False
    )
    return done, notes.read_text(), stacks.read_text()


def test_the_recorders_notes_are_what_the_parent_reads(tmp_path: Path) -> None:
    """An exception that nobody caught arrives whole, in the notes and in torchelastic's error file; stderr is untouched."""
    done, notes, _ = _run_recorded(tmp_path, "def f():\n    raise ValueError('caf\u00e9')\nf()")
    fault, finished_s = _read_end(notes)
    assert fault is not None
    assert (fault.message, fault.where, finished_s) == (
        "ValueError: caf\u00e9",
        f"{tmp_path}/train.py:8",
        None,
    )
    assert (done.returncode, done.stdout, fault.callstack) == (1, "", done.stderr)
    written = parse_fault((tmp_path / "error.json").read_text())
    assert written is not None
    assert (written.message, written.callstack) == (fault.message, fault.callstack)


@pytest.mark.parametrize("code", ["", "import sys; sys.exit(3)", "import atexit; atexit.register(print)"])
def test_a_script_that_is_through_says_so(tmp_path: Path, code: str) -> None:
    """The end of the script is noted, whatever its exit code, and no error file is written."""
    _, notes, _ = _run_recorded(tmp_path, code)
    fault, finished_s = _read_end(notes)
    assert fault is None
    assert finished_s is not None
    assert not (tmp_path / "error.json").exists()


def test_what_is_handled_at_sys_exit_is_noted(tmp_path: Path) -> None:
    """The exception for which a script leaves stands in its notes, and none where it leaves for no exception, or only a thread ends; the exit code is the script's."""
    code = "import sys\ntry:\n    {}['lr']\nexcept KeyError:\n    sys.exit(3)"
    done, text, _ = _run_recorded(tmp_path, code)
    notes = read_notes(text)
    assert (done.returncode, done.stderr, notes.fault) == (3, "", None)
    assert notes.handled is not None
    fault, asked = notes.handled
    assert (fault.message, fault.where, asked) == ("KeyError: 'lr'", f"{tmp_path}/train.py:9", 3)
    in_thread = "import sys, threading\ndef leave():\n    try:\n        {}['lr']\n    except KeyError:\n        sys.exit(3)\nthreading.Thread(target=leave).start()"
    for number, other in enumerate(("import sys; sys.exit(3)", in_thread)):
        (tmp_path / str(number)).mkdir()
        assert read_notes(_run_recorded(tmp_path / str(number), other)[1]).handled is None


def test_a_crash_leaves_its_stack(tmp_path: Path) -> None:
    """A signal from native code leaves the place where it happened, and no note of an end."""
    done, notes, stacks = _run_recorded(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert done.returncode == -11
    stack = parse_stack(split_crash(stacks)[1])
    assert stack is not None
    assert stack.where == f"{tmp_path}/train.py:8"
    assert _read_end(notes) == (None, None)


def test_only_the_last_program_of_a_shell_rank_counts() -> None:
    """`python prepare.py; exec python train.py`: the error of the first is not the end of the rank."""
    fault = json.dumps(
        {
            "note": "exception",
            "message": "KeyError",
            "traceback": "",
            "time_s": 1,
            "monotonic_s": 1,
            "where": None,
        }
    )
    assert _read_end('{"note": "armed"}\n' + fault + '\n{"note": "armed"}\n') == (None, None)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/opt/other/src/rankwise/evidence/in_rank/intercept_calls.py", False),
        ("/opt/tools/rankwise/runtime/session.py", False),
        ("/home/you/rankwise/train.py", True),
    ],
)
def test_a_line_of_ours_in_another_installation_is_not_the_users(file: str, *, is_users: bool) -> None:
    """A stack may be read by another installation, or on another machine, than the one that wrote it."""
    assert Frame(file=file, line=1, function="f").is_users is is_users


_ARMED, _FINISHED = '{"note": "armed"}', '{"note": "finished", "monotonic_s": 5.0}'
_ENDING = '{"note": "ending", "pid": 7, "stderr_bytes": null}'
_LIBRARYS = '["/usr/lib/python3.12/threading.py", 1430, "run"]'
_LEFT = f'{{"note": "left", "frames": [{_LIBRARYS}, ["/job/train.py", 12, "stop"], ["/job/train.py", 40, "<module>"]]}}'


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ((_ARMED, _ENDING, _FINISHED), Ending(stderr_bytes=(None,))),
        (
            (_ARMED, _ENDING.replace("null", "12"), _FINISHED, _ENDING.replace("null", "15")),
            Ending(stderr_bytes=(12, 15)),
        ),
        ((_ARMED, _ENDING), None),
        ((_ARMED, _FINISHED), None),
        ((_ARMED, _ENDING.replace("7", "8"), _FINISHED), None),
        ((_ARMED, _ENDING, _FINISHED, _ARMED), None),
        (
            (_ARMED, _ENDING, _FINISHED, _ARMED, _ENDING.replace("null", "9"), _FINISHED),
            Ending(stderr_bytes=(9,)),
        ),
        ((_ARMED, _ENDING[:20], _FINISHED), None),
        ((_ARMED, _ENDING, _ENDING, _LEFT), Ending(stderr_bytes=(None, None))),
    ],
)
def test_where_a_ranks_own_words_end(notes: tuple[str, ...], expected: Ending | None) -> None:
    """Only of the process that is the rank, only if it came through atexit or called os._exit, and only of its last Python.

    A shell behind its Python still says why it ends.
    """
    assert read_notes("\n".join(notes)).find_ending(7) == expected


def test_the_line_that_calls_os_exit_is_that_of_the_last_python() -> None:
    """It is where the rank left; a shell that runs another Python behind it left elsewhere."""
    assert read_notes(f"{_ARMED}\n{_LEFT}").left_at == "/job/train.py:12"
    assert read_notes(f"{_ARMED}\n{_LEFT}\n{_ARMED}").left_at is None


def test_a_librarys_thread_that_calls_os_exit_is_no_line_of_the_scripts() -> None:
    """``threading.Timer(5, os._exit, [3])``: only Python's own lines stand on that stack, and the fault is in none of them."""
    left = f'{{"note": "left", "frames": [{_LIBRARYS}]}}'
    assert read_notes(f"{_ARMED}\n{left}").left_at is None
    assert read_notes(f"{_ARMED}\n{_ENDING}\n{left}").find_ending(7) is not None
