"""When a rank dies the report names the first one to leave, why and where, in JSON and on the terminal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import (
    line_of,
    list_marked,
    read_report,
    run_rankwise,
    run_reported,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from support import Result

pytestmark = pytest.mark.linux
TWO = ["--nproc-per-node", "2", "train.py"]
RESULT_KEYS = {"kind", "culprits", "class", "where", "waiting", "message", "fix", "exits", "logs"}
INIT = """
    import os, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    t = torch.ones(1); dist.all_reduce(t)
"""


def fail_on_one(body: str, folder: Path, *, setup: str = "import os, sys, time, signal", others: str = "time.sleep(30)",
                args: list[str] | None = None, env: dict[str, str | None] | None = None) -> tuple[Result, dict[str, Any], Path]:  # fmt: skip
    """Let rank 1 of two fail with ``body`` while rank 0 goes on; return the end, the report and the script."""
    lines = [
        setup,
        "if os.environ['RANK'] == '1':",
        *(f"    {line}" for line in body.splitlines()),
        "else:",
        f"    {others}",
    ]
    script = write_script(folder, "\n".join(lines) + "\n")
    result, report = run_reported(args or TWO, folder, env=env)
    assert report.keys() >= RESULT_KEYS
    assert "Traceback (most recent call last)" not in result.err.split("rankwise: the job")[1].split("| Traceback")[0]
    return result, report, script


def find_process(text: str) -> int:
    """Return the pid of our process whose command holds ``text``."""

    def look() -> int:
        return next((int(line.split()[0]) for line in list_marked() if text in line), 0)

    return int(wait_until(look, 20, text))


def find_supervisor(launcher: int) -> int:
    """Return the pid of the launcher's supervisor: its only child of the same command."""
    command = Path(f"/proc/{launcher}/cmdline").read_bytes()

    def look() -> int:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if Path(f"/proc/{child}/cmdline").read_bytes() == command:
                return int(child)
        return 0

    return int(wait_until(look, 10, "a supervisor"))


def test_success_is_reported_too(tmp_path: Path) -> None:
    """A job that went well has a report of kind ok, and not a word of ours on the terminal."""
    write_script(tmp_path, "pass")
    result, report = run_reported(TWO, tmp_path)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert report["kind"] == "ok"
    assert report["culprits"] == []
    assert report["exits"] == {"0": 0, "1": 0}


def test_an_exception_while_others_reduce(tmp_path: Path) -> None:
    """The rank that raised is the culprit, with its line; the rank that waited in all_reduce only lost its peer."""
    script = write_script(
        tmp_path,
        INIT
        + """
    if rank == 1:
        time.sleep(0.3)
        raise ValueError("loss is nan")
    dist.all_reduce(t)""",
    )
    result, report = run_reported(TWO, tmp_path)
    assert result.code == 1
    assert (report["kind"], report["culprits"]) == ("failure", [1])
    assert report["where"] == line_of(script, "raise ValueError")
    assert "ValueError: loss is nan" in report["message"]
    place = f"{script}:{len(script.read_text().splitlines())}"
    assert [(waiting["rank"], waiting["where"]) for waiting in report["waiting"]] == [(0, place)]
    assert report["waiting"][0]["op"] == "all_reduce"
    assert "rank 1: ValueError: loss is nan" in result.err
    assert "rank 0 lost its peer" in result.err or "rank 0 terminated by rankwise" in result.err
    assert report["where"] in result.err


def test_a_kill_while_others_reduce(tmp_path: Path) -> None:
    """A rank killed with -9 is the culprit, not the peer that complains of a closed connection."""
    write_script(tmp_path, INIT + "\n    if rank == 1: os.kill(os.getpid(), 9)\n    dist.all_reduce(t)\n")
    result, report = run_reported(TWO, tmp_path)
    assert (result.code, report["culprits"]) == (137, [1])
    assert "SIGKILL" in report["reason"]
    assert report["exits"]["1"] == -9


def test_leaving_early_with_exit_0_is_the_cause(tmp_path: Path) -> None:
    """A rank that ends with exit code 0 while another is in a collective is to blame, and not who complains: the place is its only exit call."""
    script = write_script(tmp_path, INIT + "\n    if rank == 1: sys.exit(0)\n    dist.barrier()\n")
    result, report = run_reported(TWO, tmp_path)
    assert result.code == 1
    assert report["culprits"] == [1]
    assert report["where"] == line_of(script, "sys.exit(0)")
    assert "exit code 0" in report["message"]


def test_all_ranks_alike(tmp_path: Path) -> None:
    """An error that all ranks have is told once, for all; its traceback is quoted only if the console has not just shown it."""
    wait = "import os, pathlib\npathlib.Path('up' + os.environ['RANK']).touch()\nwhile len(list(pathlib.Path().glob('up*'))) < 4: pass\n"
    script = write_script(tmp_path, wait + "raise KeyError('config')\n")
    result, report = run_reported(["--nproc-per-node", "4", "train.py"], tmp_path)
    assert result.code == 1
    assert len(report["culprits"]) >= 2
    assert report["where"] == line_of(script, "raise")
    assert "| KeyError" not in result.err
    assert result.err.count("\nKeyError: 'config'") >= 2
    hidden, _ = run_reported(["--nproc-per-node", "4", "-r", "3", "train.py"], tmp_path)
    assert hidden.err.count("| KeyError: 'config'") == hidden.err.count("\n    | Traceback") == 1


def test_an_exception_without_torch(tmp_path: Path) -> None:
    """A rank that never imports torch has its exception reported all the same; the other was terminated by rankwise."""
    result, report, script = fail_on_one("raise RuntimeError('no data')", tmp_path)
    assert result.code == 1
    assert report["culprits"] == [1]
    assert report["where"] == line_of(script, "raise")
    assert "RuntimeError: no data" in report["traceback"]
    assert report["exits"] == {"0": -15, "1": 1}
    assert "rank 0 terminated by rankwise" in result.err


def test_sys_exit_with_a_number(tmp_path: Path) -> None:
    """sys.exit(3) of one rank: its number is the launcher's."""
    result, report, _ = fail_on_one("sys.exit(3)", tmp_path)
    assert (result.code, report["culprits"], report["exits"]["1"]) == (3, [1], 3)
    assert "exit code 3" in report["reason"]


def test_sys_exit_with_a_text(tmp_path: Path) -> None:
    """sys.exit("text") prints the text and gives 1; it is the message, whatever threads, atexit and objects that are taken apart print."""
    noise = """class Library:
    def __del__(self, write=os.write):
        write(2, b'library: Error: see https://leaks')
library = Library()
atexit.register(os.write, 2, b'logger: Error: not sent\\n')
threading.Thread(target=lambda: (threading.main_thread().join(), os.write(2, b'thread: Error: no more\\n'))).start()"""
    setup = "import atexit, os, sys, threading, time, torch"
    result, report, _ = fail_on_one(f"{noise}\nsys.exit('no such checkpoint')", tmp_path, setup=setup)
    assert (result.code, report["culprits"]) == (1, [1])
    assert "no such checkpoint" in report["message"]
    noises = "thread: Error: no more\nlogger: Error: not sent\nlibrary: Error: see https://leaks\n"
    assert result.err.startswith(f"no such checkpoint\n{noises}rankwise: ")
    assert "last lines of its stderr" not in result.err


def test_the_scripts_own_argparse(tmp_path: Path) -> None:
    """A script that refuses its arguments: its own message is the cause, and the exit code is explained."""
    write_script(tmp_path, "import argparse; argparse.ArgumentParser().parse_args()")
    result, report = run_reported([*TWO, "--lr", "1"], tmp_path)
    assert result.code == 2
    assert "unrecognized arguments: --lr 1" in report["message"]
    assert "argument parser" in report["reason"]


def test_os_exit(tmp_path: Path) -> None:
    """os._exit(5) leaves no exception: number and line are reported, and not what a child of the rank prints that misses it."""
    setup = """import os, time, torch
reader, writer = os.pipe()
if os.environ["RANK"] == "1" and os.fork() == 0:
    os.close(writer)
    os.read(reader, 1)
    raise EOFError("no more orders")"""
    result, report, script = fail_on_one("os._exit(5)", tmp_path, setup=setup)
    assert (result.code, report["culprits"], report["exits"]["1"]) == (5, [1], 5)
    assert report["message"] == "rank 1: ended with exit code 5"
    assert report["where"] == line_of(script, "os._exit")


@pytest.mark.parametrize(
    ("body", "name", "number"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 9),
        ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM", 15),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV", 11),
        ("os.abort()", "SIGABRT", 6),
        ("import mmap, tempfile; f = tempfile.TemporaryFile(); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.truncate(0); m[0]",
         "SIGBUS", 7),
        ("signal.signal(signal.SIGPIPE, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGPIPE)", "SIGPIPE", 13),
    ],
)  # fmt: skip
def test_signals_are_explained(body: str, name: str, number: int, tmp_path: Path) -> None:
    """A rank that dies of a signal: its name, what it means, and for a crash the line of the script."""
    setup = "import os, resource, sys, time, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    result, report, script = fail_on_one(body, tmp_path, setup=setup)
    assert result.code == 128 + number
    assert (report["culprits"], report["exits"]["1"]) == ([1], -number)
    assert f"killed by {name} ({number})" in report["reason"]
    assert f"killed by {name}" in result.err
    if name in {"SIGSEGV", "SIGABRT", "SIGBUS"}:
        assert report["where"] == f"{script}:3"
    if name == "SIGBUS":
        assert report["class"] == "X16"


def test_the_users_record(tmp_path: Path) -> None:
    """A script with torch's @record is reported with the user's line, not torch's wrapper."""
    body = "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n    raise OSError('disk')\nmain()"
    result, report, script = fail_on_one(body, tmp_path)
    assert (result.code, report["culprits"]) == (1, [1])
    assert "OSError: disk" in report["message"]
    assert report["where"] == line_of(script, "raise OSError")


@pytest.fixture(scope="module")
def boom(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any], Path]:
    """Let rank 1 print a word and raise, once; give the end, the report, and the launcher's own error file."""
    folder = tmp_path_factory.mktemp("boom")
    path = folder / "own_error.json"
    body = "print('a word before', file=sys.stderr)\nraise ValueError('boom')"
    result, report, _ = fail_on_one(body, folder, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    return result, report, path


def test_the_launchers_own_error_file(boom: tuple[Result, dict[str, Any], Path]) -> None:
    """A scheduler that set TORCHELASTIC_ERROR_FILE for the launcher finds the first cause in torchelastic's schema."""
    body = json.loads(boom[2].read_text())
    assert "ValueError: boom" in body["message"]["message"]
    assert "train.py" in body["message"]["extraInfo"]["py_callstack"]
    assert body["message"]["extraInfo"]["timestamp"].isdigit()
    assert body["message"]["errorCode"] == boom[0].code == 1


def test_each_ranks_error_file(tmp_path: Path) -> None:
    """A rank's TORCHELASTIC_ERROR_FILE is written without @record, in torchelastic's schema."""
    fail_on_one("raise ValueError('boom')", tmp_path, args=["--log-dir", "logs", *TWO])
    (path,) = tmp_path.glob("logs/*/attempt_0/1/error.json")
    body = json.loads(path.read_text())
    assert body["message"]["message"] == "ValueError: boom"
    assert set(body["message"]["extraInfo"]) == {"py_callstack", "timestamp"}


def test_a_text_that_raises(tmp_path: Path) -> None:
    """An exception whose text can't be made is still the cause, with its type and line."""
    body = "class Bad(Exception):\n    def __str__(self): raise RuntimeError('no text')\nraise Bad()"
    result, report, script = fail_on_one(body, tmp_path)
    assert (result.code, report["culprits"]) == (1, [1])
    assert "Bad" in report["message"]
    assert report["where"] == line_of(script, "raise Bad()")


def test_a_text_of_ten_megabytes(tmp_path: Path) -> None:
    """A huge message is cut: report and terminal stay readable."""
    result, report, script = fail_on_one("raise ValueError('x' * 10_000_000)", tmp_path)
    assert report["culprits"] == [1]
    assert report["where"] == line_of(script, "raise")
    assert len(json.dumps(report)) < 400_000
    assert len(result.err.split("rankwise: the job")[1]) < 200_000


def test_a_syntax_error(tmp_path: Path) -> None:
    """A script that Python can't read: file and line of the error."""
    script = write_script(tmp_path, "import os\nx = = 1\nprint('never')\n")
    result, report = run_reported(TWO, tmp_path)
    assert result.code == 1
    assert "SyntaxError" in report["message"]
    assert report["where"] == f"{script}:2"


def test_an_exception_in_the_users_module(tmp_path: Path) -> None:
    """An error inside a module of the user's is placed there, not at its import or call."""
    module = write_script(tmp_path, "import json\ndef load(text):\n    return json.loads(text)\n", "mine/data.py")
    _, report, _ = fail_on_one("import mine.data; mine.data.load('{')", tmp_path)
    assert report["where"] == line_of(module, "json.loads")
    assert "JSONDecodeError" in report["message"]


def test_a_keyboard_interrupt_of_the_scripts_own(tmp_path: Path) -> None:
    """A KeyboardInterrupt that the script raises itself is its failure, not the user's Ctrl-C."""
    result, report, script = fail_on_one("raise KeyboardInterrupt", tmp_path)
    assert report["culprits"] == [1]
    assert report["where"] == line_of(script, "raise")
    assert result.code == 130


def test_an_exception_group_and_a_chain(tmp_path: Path) -> None:
    """Chained exceptions: the report shows both, the last one is the message."""
    body = "try:\n    {}['key']\nexcept KeyError as error:\n    raise RuntimeError('bad config') from error"
    _, report, _ = fail_on_one(body, tmp_path)
    assert "RuntimeError: bad config" in report["message"]
    assert "KeyError: 'key'" in report["traceback"]


def test_a_script_that_replaces_the_excepthook(tmp_path: Path) -> None:
    """A sys.excepthook of the script's own runs, and the exception is reported all the same."""
    body = "def hook(*args): print('mine', flush=True)\nsys.excepthook = hook\nraise ValueError('boom')"
    result, report, script = fail_on_one(body, tmp_path)
    assert result.out == "mine\n"
    assert report["where"] == line_of(script, "raise ValueError")


def test_a_script_that_closes_all_descriptors(tmp_path: Path) -> None:
    """A script that closes everything above 2 (a daemon's habit) has at least its traceback from standard error."""
    result, report, _ = fail_on_one("os.closerange(3, 256)\nraise ValueError('boom')", tmp_path)
    assert (result.code, report["culprits"]) == (1, [1])
    assert "ValueError: boom" in report["message"]


def test_a_script_that_reuses_our_descriptors(tmp_path: Path) -> None:
    """A script whose own files got the recorder's numbers finds them clean after its crash."""
    body = "os.closerange(3, 256)\nfds = [os.open('own.bin', os.O_RDWR | os.O_CREAT) for _ in range(150)]\nraise ValueError('boom')"
    fail_on_one(body, tmp_path)
    assert (tmp_path / "own.bin").read_bytes() == b""


def test_a_flood_on_standard_error(tmp_path: Path) -> None:
    """200 MB on standard error, then a failure: its end is shown, and the launcher's memory stays small."""
    script = write_script(
        tmp_path,
        """
        import os, sys
        line = b"x" * 199 + b"\\n"
        for _ in range(10_000): os.write(2, line * 100)
        status = open(f"/proc/{os.environ['LAUNCHER']}/status").read() if "LAUNCHER" in os.environ else ""
        print(open(f"/proc/{open('launcher.pid').read()}/status").read(), flush=True)
        raise ValueError("after the flood")
        """,
    )
    (tmp_path / "go.sh").write_text('echo -n $$ > launcher.pid; exec "$@"')
    import sys

    with Path(os.devnull).open("wb") as nowhere:
        import subprocess

        from support import make_env

        command = [
            "/bin/sh",
            "go.sh",
            sys.executable,
            "-m",
            "rankwise.run",
            "--report",
            "report.json",
            "train.py",
        ]
        done = subprocess.run(command, cwd=tmp_path, env=make_env(), stdout=subprocess.PIPE, stderr=nowhere, text=True, timeout=60, check=False)  # fmt: skip
    report = read_report(tmp_path / "report.json")
    assert done.returncode == 1
    assert report["where"] == line_of(script, "raise ValueError")
    high_kb = int(done.stdout.split("VmHWM:")[1].split()[0])
    assert high_kb < 60_000, high_kb
    assert report["last_words"].rstrip().endswith("ValueError: after the flood")
    log = Path(next(iter(report["logs"].values())))
    assert sum(file.stat().st_size for file in log.parent.iterdir()) < 40 << 20


def test_the_stores_process_killed(tmp_path: Path) -> None:
    """A store killed with -9 ends the job with a report that says so; no rank is blamed."""
    write_script(tmp_path, "import time; time.sleep(60)")
    with start_rankwise(["--report", "report.json", *TWO], tmp_path) as job:
        os.kill(find_process("store_process.py"), signal.SIGKILL)
        result = job.finish(20)
    report = read_report(tmp_path / "report.json")
    assert result.code == 137
    assert (report["kind"], report["culprits"]) == ("failure", [])
    assert "store" in report["message"]


def test_the_supervisor_killed(tmp_path: Path) -> None:
    """The supervisor killed with -9 takes all ranks with it, and the launcher says what happened."""
    write_script(tmp_path, "import pathlib, os, time; pathlib.Path(os.environ['RANK']).touch(); time.sleep(60)")
    with start_rankwise(["--report", "report.json", *TWO], tmp_path) as job:
        wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        os.kill(find_supervisor(job.process.pid), signal.SIGKILL)
        result = job.finish(20)
    report = read_report(tmp_path / "report.json")
    assert result.code == 137
    assert report["culprits"] == []
    assert "supervisor" in report["message"]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    """A --report folder that goes during the job costs a line on the terminal, not the job or its exit code."""
    write_script(tmp_path, "import os, sys; os.rmdir('place'); sys.exit(int(sys.argv[1]))")
    for code in (0, 4):
        (tmp_path / "place").mkdir()
        result = run_rankwise(["--report", "place/report.json", "train.py", str(code)], tmp_path)
        assert result.code == code
        assert "place/report.json" in result.err


def test_a_traceback_that_the_script_prints_itself(tmp_path: Path) -> None:
    """A script that logs its exception and leaves by sys.exit(1): the place is that of the logged traceback."""
    body = "import logging\ntry:\n    {}['key']\nexcept KeyError:\n    logging.exception('no key'); sys.exit(1)"
    _, report, script = fail_on_one(body, tmp_path)
    assert (report["culprits"], report["where"]) == ([1], line_of(script, "{}['key']"))


def test_a_program_that_cannot_start(tmp_path: Path) -> None:
    """A program that is no program (no shebang, wrong format) is reported as a failure, without a traceback of ours."""
    (tmp_path / "prog").write_bytes(b"\x00\x01garbage")
    (tmp_path / "prog").chmod(0o755)
    result, report = run_reported(["--no-python", str(tmp_path / "prog")], tmp_path)
    assert result.code in {126, 127}
    assert "Traceback" not in result.err
    assert "prog" in result.err
    assert report["kind"] == "failure"


def test_a_rank_in_a_script_of_shell(tmp_path: Path) -> None:
    """A shell script as the program: a Python below it that raises is still named with its line."""
    script = write_script(tmp_path, "raise ValueError('in python')")
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{__import__('sys').executable} train.py\n")
    (tmp_path / "job.sh").chmod(0o755)
    _, report = run_reported(["--no-python", "./job.sh"], tmp_path)
    assert "ValueError: in python" in report["message"]
    assert str(script.name) in (report["traceback"] + report["last_words"])


def test_a_thread_that_dies_is_not_the_ranks_end(tmp_path: Path) -> None:
    """An exception in a thread of the script's is printed by Python and ends nothing."""
    write_script(
        tmp_path,
        "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\nprint('on')",
    )
    result, report = run_reported(["train.py"], tmp_path)
    assert (result.code, result.out, report["kind"]) == (0, "on\n", "ok")


def test_the_log_named_in_the_report_holds_everything(boom: tuple[Result, dict[str, Any], Path]) -> None:
    """The report names the culprit's full log; it survives the job and holds its standard error."""
    text = Path(boom[1]["logs"]["1"]).read_text()
    assert "a word before" in text
    assert "ValueError: boom" in text


def test_no_colours_without_a_terminal(boom: tuple[Result, dict[str, Any], Path]) -> None:
    """The report has no escape sequences when it does not go to a terminal."""
    assert "\x1b" not in boom[0].err
