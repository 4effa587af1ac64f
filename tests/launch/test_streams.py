"""What ranks print and read: as under torchrun on a terminal, whole lines from many, files where asked, nobody slowed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import (
    RANKWISE,
    TORCHRUN,
    Running,
    Terminal,
    make_env,
    run_rankwise,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.linux
ISATTY = "import os, sys; sys.stdout.write(f\"{os.environ['RANK']}:{[os.isatty(fd) for fd in range(3)]}\\n\")"
TALK = """
    import os, sys
    rank = os.environ["RANK"]
    for word in ("alpha", "beta"):
        sys.stdout.write(f"out {word} {rank}\\n"); sys.stderr.write(f"err {word} {rank}\\n")
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_terminals_are_terminals(ranks: str, tmp_path: Path) -> None:
    """On a terminal all three streams of every rank are terminals, as under torchrun."""
    write_script(tmp_path, ISATTY)
    seen = []
    for which in (RANKWISE, TORCHRUN):
        with Terminal([*which, "--nproc-per-node", ranks, "train.py"], tmp_path) as terminal:
            assert terminal.finish().code == 0
            seen.append(sorted(re.findall(r"\d:\[[^\]]*\]", terminal.text)))
    assert seen[0] == seen[1]
    assert seen[0][0] == "0:[True, True, True]"


def test_pipes_are_no_terminals(tmp_path: Path) -> None:
    """Without a terminal no stream is one; with only standard output piped, standard error still is."""
    write_script(tmp_path, ISATTY)
    assert run_rankwise(["train.py"], tmp_path).out == "0:[False, False, False]\n"
    read, write = os.pipe()
    with Terminal([*RANKWISE, "train.py"], tmp_path, stdout=write) as terminal:
        os.close(write)
        assert terminal.finish().code == 0
    assert os.read(read, 1000) == b"0:[True, False, True]\n"
    os.close(read)


def test_the_window_size_is_the_terminals(tmp_path: Path) -> None:
    """A rank sees the terminal's rows and columns on standard error too, and follows when the window changes."""
    write_script(
        tmp_path,
        """
        import os, time
        def sizes(): return [tuple(os.get_terminal_size(fd))[::-1] for fd in range(3)]
        print(sizes(), flush=True)
        while sizes()[2] != (50, 200): time.sleep(0.01)
        print("grown", flush=True)
        """,
    )
    with Terminal([*RANKWISE, "train.py"], tmp_path, size=(40, 123)) as terminal:
        wait_until(lambda: "[(40, 123), (40, 123), (40, 123)]" in terminal.text, what="the first size")
        terminal.resize(50, 200)
        assert terminal.finish(10).code == 0, terminal.text


def test_progress_bars_pass_as_they_are(tmp_path: Path) -> None:
    r"""What tqdm writes (\\r, no newline, escapes) reaches the terminal byte for byte and at once."""
    write_script(
        tmp_path,
        r"""
        import sys, time, pathlib
        for step in range(4):
            sys.stderr.write(f"\r{step * 25:3d}%|{'█' * step}\x1b[A"); sys.stderr.flush()
        while not pathlib.Path("go").exists(): time.sleep(0.01)
        sys.stderr.write("\ndone\n")
        """,
    )
    bar = "\r  0%|\x1b[A\r 25%|█\x1b[A\r 50%|██\x1b[A\r 75%|███\x1b[A"
    with Terminal([*RANKWISE, "train.py"], tmp_path) as terminal:
        wait_until(lambda: bar in terminal.text, 10, "the bar, before its line ends")
        (tmp_path / "go").touch()
        assert terminal.finish().out == bar + "\r\ndone\r\n"


def test_both_streams_keep_their_order(tmp_path: Path) -> None:
    """Where both lead to one terminal or one pipe, what a rank prints to either comes in its order, as under torchrun: bars of tqdm and lines above them."""
    write_script(
        tmp_path,
        """
        import sys
        for step in range(40):
            sys.stderr.write(f"{step}"); sys.stderr.flush()
            print(f"/{step}", flush=True)
        """,
    )
    lines = [f"{step}/{step}" for step in range(40)]
    with Terminal([*RANKWISE, "train.py"], tmp_path) as terminal:
        assert terminal.finish().code == 0
        assert terminal.text.split() == lines
    both = subprocess.run([*RANKWISE, "train.py"], cwd=tmp_path, env=make_env(), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=True)  # fmt: skip
    assert both.stdout.split() == lines


def test_half_lines_of_several_ranks_appear_soon(tmp_path: Path) -> None:
    """A prompt or bar of one of two ranks is not held back until its newline."""
    write_script(tmp_path, "import os, sys, time, pathlib\nif os.environ['RANK'] == '1': sys.stderr.write('half')\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)")  # fmt: skip
    with start_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path) as job:
        wait_until(lambda: job.err == "half", 5, "half a line")
        (tmp_path / "go").touch()
        assert job.finish().code == 0


def logs_of(launcher: Sequence[str], args: Sequence[str], folder: Path) -> tuple[dict[str, str], str, str]:
    """Run with a log folder; return its files (without the run's random folder), and both outputs sorted."""
    where = folder / ("logs_" + ("ours" if launcher is RANKWISE else "theirs"))
    result = run_rankwise(
        ["--log-dir", str(where), "--nproc-per-node", "2", *args, "train.py"], folder, launcher=launcher
    )
    assert result.code == 0, result.err
    files = {
        str(file.relative_to(where)).partition("/")[2]: file.read_text()
        for file in sorted(where.rglob("*"))
        if file.is_file()
    }
    # Torchrun, on a busy machine, reads half a line and puts its header once more before the rest.
    texts = (
        re.sub(r"(?<=.)\[default\d+\]:", "", text) if launcher is TORCHRUN else text
        for text in (result.out, result.err)
    )
    out, err = ("\n".join(sorted(text.splitlines())) for text in texts)
    return files, out, "\n".join(line for line in err.splitlines() if "err " in line)


@pytest.mark.parametrize(
    "args",
    [
        ["-r", "3"],
        ["-t", "3"],
        ["-r", "1", "-t", "2"],
        ["-r", "0:1,1:2"],
        ["-t", "1:3"],
        ["-t", "3", "--local-ranks-filter", "1"],
        ["-r", "3", "--local-ranks-filter=0"],
        ["-t", "3", "--duplicate-stdout-filters", "alpha", "--duplicate-stderr-filters", "beta,err"],
    ],
    ids=" ".join,
)
def test_logs_lie_where_torchrun_puts_them(args: list[str], tmp_path: Path) -> None:
    """-r, -t and --local-ranks-filter give torchrun's files with torchrun's contents, and its console."""
    write_script(tmp_path, TALK)
    ours, theirs = (logs_of(which, args, tmp_path) for which in (RANKWISE, TORCHRUN))
    their_files = {name: text for name, text in theirs[0].items() if text}
    our_files = {name: text for name, text in ours[0].items() if text and name != "events.jsonl"}
    # The copies of filtered lines come from all ranks, in any order.
    assert {name: sorted(text.splitlines()) for name, text in our_files.items() if name in their_files} == {
        name: sorted(text.splitlines()) for name, text in their_files.items()
    }
    assert not {name for name in our_files.keys() - their_files.keys() if name.endswith("stdout.log")}
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]


def test_the_filter_of_ranks(tmp_path: Path) -> None:
    """--local-ranks-filter shows the named ranks only, without any log folder too."""
    write_script(tmp_path, TALK)
    ours, theirs = (run_rankwise(["--nproc-per-node", "3", "--local-ranks-filter", "0,2", "train.py"], tmp_path, launcher=which)
                    for which in (RANKWISE, TORCHRUN))  # fmt: skip
    assert sorted(ours.out.splitlines()) == sorted(theirs.out.splitlines())
    assert {line.split()[-1] for line in ours.err.splitlines()} == {"0", "2"}


def test_teed_lines_are_whole_and_carry_their_rank(tmp_path: Path) -> None:
    """With -t 3, lines that four ranks print in pieces appear whole, each with its rank in front."""
    write_script(
        tmp_path,
        """
        import os, sys
        mark = os.environ["RANK"] * 5000
        for _ in range(60):
            for at in range(0, 5000, 700): os.write(1, mark[at:at + 700].encode())
            os.write(1, b"\\n")
        os.write(1, b"last without newline")
        """,
    )
    result = run_rankwise(["--nproc-per-node", "4", "-t", "3", "train.py"], tmp_path)
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) == 244
    expected = {f"[default{rank}]:{str(rank) * 5000}" for rank in range(4)}
    assert set(lines) == expected | {f"[default{rank}]:last without newline" for rank in range(4)}


def test_the_prefix_template(tmp_path: Path) -> None:
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE shapes the prefix, as under torchrun."""
    write_script(tmp_path, "print('x')")
    env: dict[str, str | None] = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}/${local_rank}/${other}> "
    }
    args = ["-t", "1", "--role", "actor", "train.py"]
    ours, theirs = (run_rankwise(args, tmp_path, env=env, launcher=which).out for which in (RANKWISE, TORCHRUN))
    assert ours == theirs == "<actor/0/0/${other}> x\n"


def test_a_flood_slows_nobody_and_fills_no_memory(tmp_path: Path) -> None:
    """With -t, a rank that prints 300 MB doesn't delay another's lines, and the launcher stays small."""
    write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "0":
            chunk = (b"x" * 99 + b"\\n") * 10_000
            for _ in range(300): os.write(1, chunk)
        else:
            for number in range(5): os.write(1, b"quick %d\\n" % number); time.sleep(0.05)
        """,
    )
    running = Running(
        [*RANKWISE, "--nproc-per-node", "2", "-t", "1", "--log-dir", "logs", "train.py"],
        tmp_path,
        out=subprocess.PIPE,
    )
    stream, seen_s, size, high_kb, rest = running.process.stdout, {}, 0, 0, b""
    assert stream is not None
    with stream:
        while data := os.read(stream.fileno(), 1 << 20):
            size += len(data)
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if b"quick" in line:
                    seen_s[line] = time.monotonic() - running.started_s
            if running.process.poll() is None:
                status = Path(f"/proc/{running.process.pid}/status").read_text()
                high_kb = max(high_kb, int((re.search(r"VmHWM:\s*(\d+)", status) or [0, 0])[1]))
    result = running.finish(60)
    assert result.code == 0, result.err
    assert set(seen_s) == {f"[default1]:quick {number}".encode() for number in range(5)}
    assert max(seen_s.values()) < 3, seen_s
    assert high_kb < 60_000, high_kb
    assert size >= 300_000_000 + 3_000_000 * len("[default0]:")


def test_a_flood_on_standard_output_is_inherited(tmp_path: Path) -> None:
    """Without -t, standard output is the launcher's own: 200 MB pass without going through it."""
    write_script(tmp_path, "import os\nfor _ in range(200): os.write(1, b'y' * 1_000_000)")
    with Path(os.devnull).open("wb") as nowhere:
        running = Running([*RANKWISE, "train.py"], tmp_path, out=nowhere.fileno())
        assert running.finish(30).wall_s < 5


@pytest.mark.parametrize("args", [[], ["-t", "3"]], ids=["inherited", "teed"])
def test_a_reader_that_goes_away_does_not_break_the_job(args: list[str], tmp_path: Path) -> None:
    """`| head -1`: the launcher outlives its reader. Teed ranks end their work; others die of their own SIGPIPE only."""
    write_script(
        tmp_path,
        """
        import os, sys, time, pathlib
        print("first line", flush=True)
        while not pathlib.Path("gone").exists(): time.sleep(0.01)
        try:
            for number in range(2000): print("more", number, "x" * 100)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        pathlib.Path("finished").touch()
        """,
    )
    running = Running([*RANKWISE, *args, "--log-dir", "logs", "train.py"], tmp_path, out=subprocess.PIPE)
    assert running.process.stdout is not None
    assert b"first line" in running.process.stdout.readline()
    running.process.stdout.close()
    (tmp_path / "gone").touch()
    result = running.finish(20)
    assert result.code == 0, result.err
    assert (tmp_path / "finished").exists()


def test_standard_error_without_a_reader_does_not_break_the_job(tmp_path: Path) -> None:
    """A standard error that nobody reads any more (`2>&1 | head`) costs messages, not the job."""
    write_script(tmp_path, "import sys, pathlib\nfor n in range(3000): print('x' * 100, file=sys.stderr)\npathlib.Path('finished').touch()")  # fmt: skip
    read, write = os.pipe()
    process = subprocess.Popen([*RANKWISE, "train.py"], cwd=tmp_path, env=make_env(), stderr=write, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    os.close(write)
    os.read(read, 10)
    os.close(read)
    assert process.wait(20) == 0
    assert (tmp_path / "finished").exists()


def test_standard_input_reaches_the_ranks(tmp_path: Path) -> None:
    """What is piped into the launcher can be read by rank 0, as under torchrun."""
    write_script(tmp_path, "import os, sys\nif os.environ['RANK'] == '0': print(sys.stdin.read().upper(), end='')")
    args = ["--nproc-per-node", "2", "train.py"]
    ours, theirs = (run_rankwise(args, tmp_path, stdin="one\ntwo\n", launcher=which) for which in (RANKWISE, TORCHRUN))
    assert ours.out == theirs.out == "ONE\nTWO\n"


def test_a_debugger_works_through_a_terminal(tmp_path: Path) -> None:
    """Pdb in a rank: its prompt appears, what is typed reaches it, and the job goes on."""
    write_script(tmp_path, "secret = 41\nbreakpoint()\nprint('went on', secret)\n")
    with Terminal([*RANKWISE, "train.py"], tmp_path) as terminal:
        wait_until(lambda: "(Pdb) " in terminal.text, 10, "the prompt")
        terminal.type("p secret + 1\n")
        wait_until(lambda: "42" in terminal.text, 5, "the answer")
        terminal.type("c\n")
        assert terminal.finish(10).code == 0
        assert "went on 41" in terminal.text


def test_input_and_hidden_input_through_a_terminal(tmp_path: Path) -> None:
    """input() prompts, echoes and reads through a terminal as it does without a launcher."""
    write_script(tmp_path, "name = input('name? ')\nprint('hello', name)\n")
    texts = []
    for command in ([*RANKWISE, "train.py"], [sys.executable, "-u", "train.py"]):
        with Terminal(command, tmp_path) as terminal:
            wait_until(lambda shown=terminal: "name? " in shown.text, 10, "the prompt")
            terminal.type("world\n")
            assert terminal.finish(10).code == 0
            texts.append(terminal.text)
    assert texts[0] == texts[1]


def test_the_report_is_coloured_on_a_terminal_only(tmp_path: Path) -> None:
    """Colours on a terminal; none with NO_COLOR."""
    write_script(tmp_path, "raise ValueError('boom')")
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with Terminal([*RANKWISE, "train.py"], tmp_path, env) as terminal:
            assert terminal.finish().code == 1
        assert ("\x1b[1;31mrankwise: the job failed" in terminal.text) == coloured
        assert "rankwise: the job failed" in terminal.text


def test_the_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    """After a job the terminal's settings are those from before it, a crash of a rank included."""
    import termios

    write_script(tmp_path, "import os; os._exit(3)")
    code = "import subprocess, sys, termios; a = termios.tcgetattr(0); subprocess.run(sys.argv[1:]); print(a == termios.tcgetattr(0), termios.tcgetattr(0)[3])"
    with Terminal([sys.executable, "-c", code, *RANKWISE, "train.py"], tmp_path) as terminal:
        text = terminal.finish().out
    assert "True" in text
    assert int(text.split("True ")[1].split()[0]) & termios.ECHO
