"""Where ranks can't be forked they are started cold: with one line that says why, or without where anybody knows."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import (
    Running,
    leftovers,
    list_marked,
    run_rankwise,
    start_rankwise,
    wait_until,
    without_patience,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from support import Result

pytestmark = pytest.mark.linux

LINE = "rankwise: cold start: "
#: What a rank was: forked or not, and on how many threads it calculates.
TELL = """
import gc, os, sys, torch
sys.stdout.write(f"{gc.get_freeze_count() > 1000} {torch.get_num_threads()}\\n")
"""
#: The same without torch, which takes a cold rank two seconds of the CPU: for tests that are not about threads.
TELL_FROZEN = """
import gc, sys
if 0: import torch
sys.stdout.write(f"{gc.get_freeze_count() > 1000}\\n")
"""
#: Imports torch, for which a forked rank starts again that has changed a variable; then it is cold, and need not.
IMPORT_IF_FORKED = "import gc\nif gc.get_freeze_count() > 1000: import torch\n"
#: Imported from beside the script by a server, it stops there until a file appears.
GATE = """
import os, pathlib, time
if "ROLE_NAME" not in os.environ:  # a rank has one
    pathlib.Path("importing.tmp").write_text(str(os.getpid()))
    os.rename("importing.tmp", f"importing.{os.getpid()}")
    end = time.monotonic() + 60
    while not pathlib.Path("go").exists() and time.monotonic() < end: time.sleep(0.005)
"""


def run_logged(
    args: Sequence[str], folder: Path, env: Mapping[str, str | None] | None = None, stdin: str | None = None
) -> tuple[Result, list[str]]:
    """Run a job and return its end, and its events but for those that come and go with every job."""
    result = run_rankwise(["--log-dir", "log", *args], folder, env=env, stdin=stdin)
    (file,) = (folder / "log").glob("*/events.jsonl")
    return result, [json.loads(line)["event"] for line in file.read_text().splitlines()]


def run_and_tell(args: Sequence[str], folder: Path, env: Mapping[str, str | None] | None = None) -> Result:
    """Run a job of two ranks that must succeed, of which the second is as warm or cold as the first."""
    result, events = run_logged(["--nproc-per-node", "2", *args], folder, env)
    assert result.code == 0, result.err
    assert ("warm.cold" in events) == (LINE in result.err or "True" not in result.out)
    return replace(result, err=without_patience(result.err))


# ------------------------------------------------------------------ because of the command


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (["--cold", "train.py"], {}),
        (["train.py"], {"RANKWISE_COLD": "1"}),
        (["--no-python", sys.executable, "train.py"], {}),
    ],
    ids=["flag", "variable", "no-python"],
)
def test_who_asks_for_a_cold_start_gets_it_in_silence(
    args: list[str], env: dict[str, str | None], tmp_path: Path
) -> None:
    """--cold, RANKWISE_COLD=1 and --no-python start plain processes, and nobody is told what he has said himself."""
    write_script(tmp_path, "import gc\nif 0: import torch\nprint(gc.get_freeze_count() > 1000)")
    result, events = run_logged(args, tmp_path, env)
    assert (result.code, result.out, result.err) == (0, "False\n", "")
    assert "warm.cold" in events
    assert "warm.ready" not in events


def test_a_script_that_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    """Nothing heavy imported, also not by the modules beside the script: no server, and no line."""
    write_script(tmp_path, "import helper, gc, sys; print(gc.get_freeze_count() > 1000, 'torch' in sys.modules)")
    write_script(tmp_path, "import json", "helper.py")
    result, events = run_logged(["train.py"], tmp_path)
    assert (result.code, result.out, result.err) == (0, "False False\n", "")
    assert "warm.ready" not in events


def test_arguments_that_differ_from_rank_to_rank_are_a_reason(tmp_path: Path) -> None:
    """${local_rank} in the arguments makes every command another one: a line, and each rank gets its own."""
    write_script(tmp_path, "import gc, sys\nif 0: import torch\nsys.stdout.write(f'{gc.get_freeze_count() > 1000} {sys.argv[1]}\\n')")  # fmt: skip
    result, _ = run_logged(["--nproc-per-node", "2", "train.py", "--x=${local_rank}"], tmp_path)
    assert sorted(result.out.splitlines()) == ["False --x=0", "False --x=1"]
    assert result.err == f"{LINE}${{local_rank}} makes the arguments of every rank different\n"


@pytest.mark.parametrize("flags", ["-I", "-E"])
def test_a_python_that_may_not_see_our_hook_never_runs_the_script_in_the_server(flags: str, tmp_path: Path) -> None:
    """A PYTHON_EXEC that ignores PYTHONPATH starts each rank once, cold; the script runs nowhere else."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {flags} "$@"\n')
    wrapper.chmod(0o755)
    write_script(
        tmp_path,
        """
        import gc, os
        if 0: import torch
        os.write(1, f"{os.environ.get('RANK')} {gc.get_freeze_count() > 1000}\\n".encode())
        """,
    )
    args = ["--nproc-per-node", "2", "train.py"]
    result, events = run_logged(args, tmp_path, {"PYTHON_EXEC": str(wrapper)})
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["0 False", "1 False"]
    assert "warm.ready" not in events
    assert LINE in result.err


# ------------------------------------------------------------------ because of the script's variables


def test_threads_set_before_torch_are_seen_in_the_text(tmp_path: Path) -> None:
    """OMP_NUM_THREADS set before `import torch` holds as in plain Python, and one line says why the start was cold."""
    write_script(tmp_path, 'import os\nos.environ["OMP_NUM_THREADS"] = "2"' + TELL)
    result = run_and_tell(["train.py"], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert result.out == "False 2\n" * 2
    assert result.err == f"{LINE}train.py:2 sets OMP_NUM_THREADS before it imports torch\n"


#: Ways to set a variable that no look at the text can see; each is tried by the rank of its number.
SECRETS = {
    "item": 'os.environ["OMP_" + "NUM_THREADS"] = "2"',
    "update": 'os.environ.update({"OMP_" + "NUM_THREADS": "2"})',
    "alias": 'e = os.environ; e["OMP_NUM_THREADS"] = "2"',
    "or": 'os.environ |= {"OMP_" + "NUM_THREADS": "2"}',
    "in a function": 'def f(name): os.environ[name] = "2"\nf("OMP_" + "NUM_THREADS")',
    "removed and set": 'os.environ.pop("OMP_" + "NUM_THREADS"); os.environ["OMP_" + "NUM_THREADS"] = "2"',
    "removed": 'os.environ.pop("OMP_" + "NUM_THREADS")',
    "deleted": 'for name in ["OMP_" + "NUM_THREADS"]: del os.environ[name]',
    "bytes": 'os.environb[b"OMP_" + b"NUM_THREADS"] = b"2"',
    "putenv": 'os.putenv("OMP_" + "NUM_THREADS", "2")',
    "unsetenv": 'os.unsetenv("OMP_" + "NUM_THREADS")',
}


def test_threads_set_in_secret_make_the_rank_start_again(tmp_path: Path) -> None:
    """What no look at the text can see: the same process starts again as the plain command, and the number is right."""
    text = """
import os, sys
with open("begun." + os.environ["RANK"], "a") as file: file.write(f"{os.getpid()} {sys.argv}\\n")
os.environ["OMP_" + "NUM_THREADS"] = "2"
"""
    write_script(tmp_path, text + TELL)
    args = ["--nproc-per-node", "2", "train.py", "a word", ""]
    result = run_rankwise(args, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert (result.code, result.out) == (0, "False 2\n" * 2)
    assert result.err == f"{LINE}the script sets OMP_NUM_THREADS before it imports torch\n"
    for rank in range(2):
        begun = (tmp_path / f"begun.{rank}").read_text().splitlines()
        assert len(begun) == 2
        assert len(set(begun)) == 1, "another process, or another command"


def test_no_way_to_change_a_variable_goes_unseen(tmp_path: Path) -> None:
    """In whatever way a script changes what torch would read before it imports torch: the rank starts again, cold."""
    text = "import gc, os, sys\nif 0: import torch\nrank = int(os.environ['RANK'])\n"
    for rank, code in enumerate(SECRETS.values()):
        text += f"if rank == {rank}:\n    " + code.replace("\n", "\n    ") + "\n"
    text += IMPORT_IF_FORKED + "sys.stdout.write(f'{rank} {gc.get_freeze_count() < 1000}\\n')"
    write_script(tmp_path, text)
    args = ["--nproc-per-node", str(len(SECRETS)), "train.py"]
    result = run_rankwise(args, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.code == 0, result.err
    seen = dict(line.split() for line in result.out.splitlines())
    assert [name for rank, name in enumerate(SECRETS) if seen[str(rank)] != "True"] == []


def test_a_rank_that_starts_again_is_as_new(tmp_path: Path) -> None:
    """Signals ignored or blocked, limits, umask, folder and name, changed before the restart, are as at the first start."""
    look = """
import ctypes, os, resource, signal
from pathlib import Path
# Some libffi keeps its own file open from the first callback on, which an import of torch makes.
ctypes.CFUNCTYPE(None)(print)
state = [os.getcwd(), str(signal.getsignal(signal.SIGTERM)), str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), os.umask(0o22),
         sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE), Path("/proc/self/comm").read_text(),
         Path("/proc/self/cmdline").read_text(), sorted(set(os.environ) - {"NEW"}), sorted(map(int, os.listdir("/proc/self/fd"))), sys.path]
"""
    text = f"""
import json, sys
{look}
with open("states", "a") as file: file.write(json.dumps(state) + "\\n")
kept = open("states")
os.set_inheritable(kept.fileno(), False)
os.environ["NEW"] = "1"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
os.umask(0o77)
os.mkdir("inner") if not os.path.exists("inner") else None
os.chdir("inner")
os.environ["OMP_" + "NUM_THREADS"] = "2"
"""
    write_script(tmp_path, text + IMPORT_IF_FORKED + TELL_FROZEN)
    result = run_rankwise(["train.py"], tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert (result.code, result.out) == (0, "False\n"), result.err
    before, after = [json.loads(line) for line in (tmp_path / "states").read_text().splitlines()]
    assert before == after


def test_variables_set_after_torch_change_nothing(tmp_path: Path) -> None:
    """Once the script has torch, setting a variable in any way neither restarts a rank nor keeps it from being warm."""
    script = 'import os, torch\nos.environ["OMP_" + "NUM_THREADS"] = "2"\nos.environ["MKL_NUM_THREADS"] = "2"\nopen("begun." + os.environ["RANK"], "x")'
    write_script(tmp_path, script + TELL)
    result = run_and_tell(["train.py"], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert (result.out, result.err) == ("True 1\n" * 2, "")


def test_a_script_that_has_torch_out_of_sight_runs_once(tmp_path: Path) -> None:
    """Also where torch is imported inside a function, a variable set afterwards does not make the script run twice."""
    write_script(tmp_path, "def get_torch():\n    import torch\n    return torch", "helper.py")
    script = """
        import os, sys
        rank = os.environ["RANK"]
        with open("begun." + rank, "a") as file: file.write("x")
        def main():
            import torch
            torch.ones(1)
            os.environ["MKL_" + "NUM_THREADS"] = "2"
        def other():
            import helper
            helper.get_torch().ones(1)
            os.environ["MKL_" + "NUM_THREADS"] = "2"
        main() if rank == "0" else other()
        """
    write_script(tmp_path, script)
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path)
    assert result.code == 0, result.err
    assert [(tmp_path / f"begun.{rank}").read_text() for rank in range(2)] == ["x", "x"], result.err


def test_a_rank_in_a_process_group_never_starts_again(tmp_path: Path) -> None:
    """A variable set in a function after init_process_group: a rank that left its group to start anew would end the job."""
    script = """
        import os, sys
        def main():
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            if dist.get_rank() == 0: os.environ["MKL_" + "NUM_THREADS"] = "2"
            dist.all_reduce(total)
            sys.stdout.write(f"{int(total)}\\n")
            dist.destroy_process_group()
        main()
        """
    write_script(tmp_path, script)
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path, timeout_s=30)
    assert (result.code, result.out, result.err) == (0, "4\n4\n", "")


def test_a_folder_for_temporary_files_set_before_torch_holds(tmp_path: Path) -> None:
    """Torch asks for the folder of temporary files when it is imported, and Python remembers it: TMPDIR set before counts."""
    (tmp_path / "scratch").mkdir()
    script = 'import os\nos.environ["TMPDIR"] = os.path.abspath("scratch")\nimport tempfile\n'
    write_script(tmp_path, script + IMPORT_IF_FORKED + "print(tempfile.gettempdir())")
    assert run_rankwise(["train.py"], tmp_path).out == f"{tmp_path / 'scratch'}\n"


@pytest.mark.parametrize("there", [None, "0"])
def test_a_variable_that_this_torch_reads_is_latched_by_whatever_name(there: str | None, tmp_path: Path) -> None:
    """What torch asks for in its import is found out there: no list knows the variables of each version.

    torch imports dill where there is one; this one asks for variables of names that no prefix of ours has, and copies all.
    """
    write_script(
        tmp_path,
        "import os, tempfile\nos.environ.get('A_SWITCH')\ntempfile.gettempdir()\ndict(os.environ)\ndef extend(use_dill): pass\n",
        "path/dill.py",
    )
    text = 'import os\nname = os.environ["RANK"] == "0" and "A_" + "SWITCH" or "TEMP"\nos.environ[name] = "."\n'
    write_script(tmp_path, text + IMPORT_IF_FORKED + "print(name, gc.get_freeze_count() > 1000, flush=True)")
    env = {"PYTHONPATH": str(tmp_path / "path"), "TEMP": there, "A_SWITCH": there}
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path, env=env)
    assert (result.code, sorted(result.out.splitlines())) == (0, ["A_SWITCH False", "TEMP True"]), result.err
    assert result.err == f"{LINE}the script sets A_SWITCH before it imports torch\n"


# ------------------------------------------------------------------ because of what is imported


@pytest.mark.parametrize("name", ["tqdm.py", "typing_extensions/__init__.py"])
def test_a_module_beside_the_script_is_the_one_that_it_gets(name: str, tmp_path: Path) -> None:
    """A file beside the script with the name of a module that is loaded early is imported by the script, as in plain Python."""
    module = name.partition(".")[0].partition("/")[0]
    write_script(tmp_path, "MINE = 1", f"code/{name}")
    script = f"import gc, sys, {module}\nif 0: import torch\nsys.stdout.write(f'{{gc.get_freeze_count() > 1000}} {{hasattr({module}, \"MINE\")}}\\n')"
    write_script(tmp_path, script, "code/train.py")
    result = run_and_tell(["code/train.py"], tmp_path)
    assert result.err == f"{LINE}{tmp_path / 'code' / name} has the name of a module that is already loaded\n"
    assert result.out == "False True\n" * 2


def test_in_a_package_the_current_folder_counts(tmp_path: Path) -> None:
    """With -m it is the current folder that shadows, not the package's."""
    write_script(tmp_path, "MINE = 1", "package/tqdm.py")
    write_script(tmp_path, TELL, "package/train.py")
    assert run_and_tell(["-m", "package.train"], tmp_path, {"OMP_NUM_THREADS": "1"}).out == "True 1\n" * 2
    write_script(tmp_path, "MINE = 1", "pickletools.py")
    write_script(tmp_path, TELL_FROZEN, "package/train.py")
    shutil.rmtree(tmp_path / "log")
    result = run_rankwise(["-m", "package.train"], tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.out == "False\n"
    assert LINE in result.err


def test_a_debugger_in_the_text_is_a_reason(tmp_path: Path) -> None:
    """A script that speaks of debugpy starts cold: it follows processes, and a forked one confuses it."""
    write_script(tmp_path, "import os\nif 'DEBUG' in os.environ: import debugpy" + TELL_FROZEN)
    result = run_and_tell(["train.py"], tmp_path)
    assert (result.out, result.err) == ("False\n" * 2, f"{LINE}the script uses debugpy\n")


# ------------------------------------------------------------------ preloads


def test_a_preload_that_starts_a_thread_is_a_reason(tmp_path: Path) -> None:
    """A fork would lose the thread: cold, and the line names the module and the thread."""
    write_script(tmp_path, "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()", "mine.py")  # fmt: skip
    write_script(tmp_path, TELL_FROZEN)
    result = run_and_tell(["--preload", "mine", "train.py"], tmp_path)
    assert result.out == "False\n" * 2
    assert result.err.startswith(f"{LINE}mine started threads (")
    assert len(result.err.splitlines()) == 1


def test_a_preload_that_is_missing_or_fails_is_a_warning(tmp_path: Path) -> None:
    """What can't be preloaded is said and left out; the ranks are forked all the same."""
    write_script(tmp_path, "raise SystemExit('mine fails')", "mine.py")
    write_script(tmp_path, TELL)
    result = run_and_tell(["--preload", "mine,not_there", "train.py"], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert result.out == "True 1\n" * 2
    assert result.err.splitlines() == [
        "rankwise: warning: --preload mine: SystemExit: mine fails",
        "rankwise: warning: --preload not_there: ModuleNotFoundError: No module named 'not_there'",
    ]


def test_the_users_own_module_can_be_preloaded(tmp_path: Path) -> None:
    """A module beside the script is found as the script finds it, run once for all ranks, and is the same object for it."""
    write_script(tmp_path, "import os, sys\nsys.stdout.write('loaded\\n')\nPATH = list(sys.path)\nLOADED_BY = os.getpid()", "mine.py")  # fmt: skip
    write_script(tmp_path, "import mine, sys, os\nassert mine.LOADED_BY != os.getpid() and mine.PATH == sys.path, (mine.PATH, sys.path)" + TELL)  # fmt: skip
    result = run_and_tell(["--preload", "mine", "train.py"], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert (result.out, result.err) == ("loaded\nTrue 1\nTrue 1\n", "")


def test_a_preload_that_asks_for_its_rank_does_not_get_anothers(tmp_path: Path) -> None:
    """A module that reads RANK when it is imported has each rank's own, as if it had been imported there."""
    write_script(tmp_path, "import os\nRANK = os.environ.get('RANK')", "mine.py")
    script = "import mine, os, sys\nif 0: import torch\nsys.stdout.write(f\"{mine.RANK == os.environ['RANK']}\\n\")"
    write_script(tmp_path, script)
    result = run_rankwise(["--nproc-per-node", "2", "--preload", "mine", "train.py"], tmp_path)
    assert result.out == "True\nTrue\n", result.err


def test_lightning_can_be_preloaded(tmp_path: Path) -> None:
    """Lightning asks for its rank when it is imported; preloaded, it has each rank's own all the same."""
    pytest.importorskip("lightning")
    script = """
        import gc, os
        from lightning.fabric.utilities.rank_zero import rank_zero_only
        os.write(1, f"{os.environ['RANK']} {rank_zero_only.rank} {gc.get_freeze_count() > 1000}\\n".encode())
        """
    write_script(tmp_path, script)
    result = run_rankwise(["--nproc-per-node", "2", "--preload", "lightning", "train.py"], tmp_path)
    assert (result.code, sorted(result.out.splitlines())) == (0, ["0 0 True", "1 1 True"]), result.err


@pytest.mark.parametrize(
    ("name", "package"),
    [("TQDM_DISABLE", "tqdm"), ("MY_SETTING", "mine")],
    ids=["torch's own import", "a preload"],
)
def test_a_setting_made_before_the_import_of_its_package_counts(name: str, package: str, tmp_path: Path) -> None:
    """What a package read in the server, for a preload or for torch, is read again in a rank that sets it first."""
    write_script(tmp_path, "import os\nSET = os.environ.get('MY_SETTING')", "mine.py")
    shown = "tqdm.tqdm([]).disable" if package == "tqdm" else "mine.SET == '1'"
    script = f"""
        import os
        os.environ["{name[:4]}" + "{name[4:]}"] = "1"
        import {package}
        import gc
        if gc.get_freeze_count() > 1000: import torch
        {"import tqdm" if package == "tqdm" else ""}
        os.write(1, repr({shown}).encode())
        """
    write_script(tmp_path, script)
    result = run_rankwise(["--preload", "mine", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "True"), result.err
    assert f"the script sets {name} before it imports" in result.err


def test_a_first_import_in_a_thread_counts_too(tmp_path: Path) -> None:
    """Wherever the script first imports torch: a variable set before is heeded, or no line says that it is."""
    text = """
        import os, threading
        os.environ["OMP_" + "NUM_THREADS"] = "1"
        def work():
            import torch
            os.write(1, str(torch.get_num_threads()).encode())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    write_script(tmp_path, text)
    result = run_rankwise(["train.py"], tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert (result.code, result.out) == (0, "1"), result.err


def test_numpy_after_torch_starts_nobody_again(tmp_path: Path) -> None:
    """With torch the script has numpy's libraries too: a variable set between both imports changes nothing."""
    text = 'import os, torch\nos.environ["OMP_" + "NUM_THREADS"] = "1"\nimport numpy\nos.write(1, b"once")'
    write_script(tmp_path, text)
    result = run_rankwise(["train.py"], tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert (result.code, result.out, result.err) == (0, "once", "")


def test_a_wrapper_runs_for_each_rank(tmp_path: Path) -> None:
    """A PYTHON_EXEC that is a script may look at LOCAL_RANK: it runs once for each rank, and a line says so."""
    wrapper = tmp_path / "python.sh"
    wrapper.write_text(f'#!/bin/sh\nexport MINE="own$LOCAL_RANK"\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    write_script(tmp_path, "import os, torch\nos.write(1, os.environ['MINE'].encode() + b' ')")
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path, env={"PYTHON_EXEC": str(wrapper)})
    assert (result.code, sorted(result.out.split())) == (0, ["own0", "own1"]), result.err
    assert f"{LINE}{wrapper} is a script" in result.err


# ------------------------------------------------------------------ attempts


def test_a_late_restart_has_the_scripts_own_modules_and_ends_as_fast(tmp_path: Path) -> None:
    """What a server imports for restarts never hides a file beside the script, and leaves the collector frozen."""
    write_script(tmp_path, "MINE = 1", "secrets.py")
    script = """
        import gc, os, secrets, time
        if 0: import torch
        os.write(1, f"{hasattr(secrets, 'MINE')} ".encode())
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(4)  # the server imports the rest when it has had no order for a second
            raise ValueError("once")
        """
    write_script(tmp_path, script)
    result = run_rankwise(["--max-restarts", "1", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "True True "), result.err
    assert f"{LINE}{tmp_path / 'secrets.py'} has the name of a module that is already loaded" in result.err
    (tmp_path / "secrets.py").unlink()
    script = script.replace(", secrets", ", atexit").replace("hasattr(secrets, 'MINE')", "gc.get_freeze_count() > 1000")
    last = 'atexit.register(lambda: os.write(1, b"frozen " if gc.get_freeze_count() > 1000 else b"not "))'
    write_script(tmp_path, script.replace("if os.environ", f"if 1: {last}\n        if os.environ"))
    result = run_rankwise(["--max-restarts", "1", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "True frozen True frozen "), result.err
    assert LINE not in result.err


def test_a_script_edited_between_two_attempts_is_read_anew(tmp_path: Path) -> None:
    """A restart runs the file as it is then, forked from the same server."""
    first = "import gc, os, pathlib\nif 0: import torch\nprint('old', gc.get_freeze_count() > 1000)\npathlib.Path('train.py').write_text(pathlib.Path('new.py').read_text())\nraise ValueError('once')"
    write_script(tmp_path, first)
    write_script(tmp_path, "import gc\nprint('new', gc.get_freeze_count() > 1000)", "new.py")
    result = run_rankwise(["--max-restarts", "1", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "old True\nnew True\n"), result.err
    assert LINE not in result.err


def test_a_preload_edited_between_two_attempts_makes_the_restart_cold(tmp_path: Path) -> None:
    """A restart never runs an old preloaded module: it is cold, sees the new text, and one line names the file."""
    write_script(tmp_path, "TEXT = 'old'", "mine.py")
    script = "import gc, mine, pathlib, sys\nif 0: import torch\nsys.stdout.write(f'{mine.TEXT} {gc.get_freeze_count() > 1000}\\n')\nif mine.TEXT == 'old':\n    pathlib.Path('mine.py').write_text(\"TEXT = 'the new one'\")\n    raise ValueError('once')"
    write_script(tmp_path, script)
    result = run_rankwise(["--max-restarts", "2", "--preload", "mine", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "old True\nthe new one False\n"), result.err
    lines = [line for line in result.err.splitlines() if line.startswith(LINE)]
    assert lines == [f"{LINE}{tmp_path / 'mine.py'} was edited after it was preloaded"]


# ------------------------------------------------------------------ kills


@contextlib.contextmanager
def start_gated(folder: Path, args: Sequence[str] = ()) -> Iterator[tuple[Running, int]]:
    """Start a job of two ranks whose server stops amid its imports; gives the launcher and the server's pid."""
    write_script(folder, GATE, "gate.py")
    if not (folder / "train.py").exists():
        write_script(folder, "import pathlib, os\npathlib.Path('ran.' + os.environ['RANK']).touch()" + TELL_FROZEN)
    command = ["--preload", "gate", "--nproc-per-node", "2", *args, "train.py"]
    with start_rankwise(command, folder, env={"OMP_NUM_THREADS": "1"}) as job:
        file = wait_until(lambda: next(folder.glob("importing.[0-9]*"), None), 60, "the server")
        yield job, int(file.suffix[1:])


def test_a_server_killed_while_it_imports_costs_only_time(tmp_path: Path) -> None:
    """With kill -9 of the server amid its imports: the ranks start cold, a line tells, the job succeeds."""
    with start_gated(tmp_path) as (job, server):
        os.kill(server, signal.SIGKILL)
        result = job.finish()
    assert (result.code, result.out) == (0, "False\n" * 2)
    assert result.err == f"{LINE}the warm server was killed by SIGKILL\n"


def test_a_server_killed_between_two_attempts_is_started_again(tmp_path: Path) -> None:
    """With kill -9 of the server while the first attempt runs: the second attempt meets, reduces and ends well."""
    script = """
        import gc, os, pathlib, signal, sys, time
        import torch, torch.distributed as dist
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        sys.stdout.write(f"{count} {int(total)} {gc.get_freeze_count() > 1000}\\n")
        if count == 0:
            pathlib.Path("up." + os.environ["RANK"]).touch()
            while not pathlib.Path("go").exists(): time.sleep(0.01)
            os._exit(9)
        dist.destroy_process_group()
        """
    write_script(tmp_path, script)
    with start_rankwise(["--nproc-per-node", "2", "--max-restarts", "1", "train.py"], tmp_path) as job:
        wait_until(lambda: len(list(tmp_path.glob("up.*"))) == 2, 60, "ranks")
        (server,) = [pid for pid in list_pids() if read_name(pid) == "rankwise-warm"]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: server not in list_pids())
        (tmp_path / "go").touch()
        result = job.finish()
    assert result.code == 0, result.err
    assert result.out.splitlines()[:2] == ["0 2 True"] * 2
    assert [line.split()[:2] for line in result.out.splitlines()[2:]] == [["1", "2"]] * 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_launcher_while_the_server_imports_ends_the_job(name: str, tmp_path: Path) -> None:
    """The launcher ends at once with 128 + N; no rank has begun, none begins, nobody is left."""
    number = getattr(signal, name)
    with start_gated(tmp_path, ["--report", "report.json"]) as (job, _):
        job.send(number)
        result = job.finish(10)
    assert result.code == 128 + number
    assert name in result.err
    assert LINE not in result.err
    assert list(tmp_path.glob("ran.*")) == []
    assert leftovers() == []
    assert json.loads((tmp_path / "report.json").read_text())["culprits"] == []


def test_a_launcher_killed_while_the_server_imports_leaves_nobody(tmp_path: Path) -> None:
    """With kill -9 of the launcher amid the server's imports: the server, the supervisor and the ranks to come are gone."""
    with start_gated(tmp_path) as (job, _):
        job.send(signal.SIGKILL)
        job.process.wait()
        assert leftovers() == []
    assert list(tmp_path.glob("ran.*")) == []


def test_a_launcher_killed_while_ranks_run_leaves_nobody(tmp_path: Path) -> None:
    """With kill -9 of the launcher: forked ranks and all that they have started, in sessions of their own or not, are gone."""
    script = """
        import os, pathlib, subprocess, time
        if 0: import torch
        subprocess.Popen(["sleep", "71"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            time.sleep(72)
        pathlib.Path("ran." + os.environ["RANK"]).touch()
        time.sleep(60)
        """
    write_script(tmp_path, script)
    with start_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path) as job:
        wait_until(lambda: len(list(tmp_path.glob("ran.*"))) == 2, 60, "ranks")
        job.send(signal.SIGKILL)
        job.process.wait()
        assert leftovers() == []


@pytest.mark.parametrize("when", ["importing", "serving"])
def test_a_server_is_deaf_to_what_is_meant_for_the_ranks(when: str, tmp_path: Path) -> None:
    """Signals by the script's name (pkill -f train.py) reach the server too, which goes on, and the ranks can take them.

    While it imports there is no rank yet that they could have been meant for.
    """
    script = """
        import gc, os, pathlib, signal, sys, time
        if 0: import torch
        def save(number, frame):
            sys.stdout.write(f"saved {number} {gc.get_freeze_count() > 1000}\\n")
            pathlib.Path("saved." + os.environ["RANK"]).touch()
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("ran." + os.environ["RANK"]).touch()
        while not pathlib.Path("end").exists(): time.sleep(0.01)
        """
    write_script(tmp_path, script)
    with start_gated(tmp_path, ["--max-restarts", "1"]) as (job, server):
        if when == "importing":
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
                os.kill(server, getattr(signal, name))
        (tmp_path / "go").touch()
        wait_until(lambda: len(list(tmp_path.glob("ran.*"))) == 2, 60, "ranks")
        assert read_name(server) == "rankwise-warm"
        for pid in list_pids():
            if b"train.py" in read_command(pid) and b"rankwise.run" not in read_command(pid):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: len(list(tmp_path.glob("saved.*"))) == 2, what="handlers")
        assert read_name(server) == "rankwise-warm"
        (tmp_path / "end").touch()
        result = job.finish()
    assert (result.code, result.out) == (0, "saved 15 True\n" * 2), result.err
    assert result.err == ""


def list_pids() -> list[int]:
    """Return the pids of this test's processes."""
    return [int(line.split()[0]) for line in list_marked()]


def read_name(pid: int) -> str:
    """Return a process's short name; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def read_command(pid: int) -> bytes:
    """Return a process's command line; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
