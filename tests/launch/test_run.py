"""A rank sees under `rankwise run` what it would see under torchrun: nothing in its script has to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support import RANKWISE, TORCHRUN, Running, Terminal, make_env, run_rankwise, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.checked]

DUMP = """
    import faulthandler, json, os, signal, sys, threading
    facts = {
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "modules": sorted(sys.modules),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "isatty": [os.isatty(fd) for fd in range(3)],
        "streams": [type(s).__name__ + str(s.line_buffering) + str(s.write_through) + s.encoding + s.errors
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "cwd": os.getcwd(),
        "file": globals().get("__file__"),
        "name": __name__,
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "threads": threading.active_count(),
        "flags": str(sys.flags),
        "trace": sys.gettrace() is None and sys.getprofile() is None and threading.gettrace() is None,
        "next_fd": os.open(os.devnull, os.O_RDONLY),
        "umask": os.umask(0o22),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "session_leader": os.getpid() == os.getsid(0),
    }
    with open(os.path.join(os.environ["DUMP_TO"], os.environ["RANK"] + ".json"), "w") as file:
        json.dump(facts, file)
"""
# Random, or different on purpose: the port and the folder of logs; the threads (ours gives a rank its cores).
DIFFERENT_VALUES = {
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "OMP_NUM_THREADS",
    "DUMP_TO",
}
# What the recorder needs: its own import tricks and nothing else.
RECORDER_MODULES = {"atexit", "faulthandler", "importlib.util", "importlib._abc", "json", "json.decoder", "json.encoder",
                    "json.scanner", "contextlib", "collections", "sitecustomize"}  # fmt: skip


def dump(launcher: tuple[str, ...], args: list[str], folder: Path, env: dict[str, str | None]) -> list[dict[str, Any]]:
    """Run a command that dumps what its ranks see, and return that by rank."""
    to = folder / f"dump_{len(list(folder.glob('dump_*')))}"
    to.mkdir()
    result = run_rankwise(args, folder, env={**env, "DUMP_TO": str(to)}, launcher=launcher)
    assert result.code == 0, result.err
    return [json.loads(file.read_text()) for file in sorted(to.iterdir())]


def compare(
    args: list[str], folder: Path, env: dict[str, str | None] | None = None, only: set[str] | None = None
) -> list[dict[str, Any]]:
    """Assert that our ranks see what torchrun's see, save for what is documented; return what ours see."""
    theirs, ours = (dump(launcher, args, folder, env or {}) for launcher in (TORCHRUN, RANKWISE))
    assert len(theirs) == len(ours) > 0
    for their, our in zip(theirs, ours, strict=True):
        assert set(our["env"]) - {"OMP_NUM_THREADS"} == set(their["env"]) - {"OMP_NUM_THREADS"}
        for name in set(our["env"]) - DIFFERENT_VALUES:
            assert our["env"][name] == their["env"][name], name
        assert our["excepthook"]
        for name in sorted(set(our) - {"env", "modules"} if only is None else only):
            assert our[name] == their[name], name
    return ours


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["train.py"], id="script"),
        pytest.param(["-m", "package.train"], id="module"),
        pytest.param(["--no-python", sys.executable, "train.py"], id="program"),
        pytest.param(["--run-path", "{folder}/train.py"], id="run-path"),
    ],
)
def test_a_rank_sees_what_it_sees_under_torchrun(how: list[str], tmp_path: Path) -> None:
    """Environment, argv, sys.path, streams, signals and descriptors are torchrun's, however the script is run."""
    write_script(tmp_path, DUMP)
    write_script(tmp_path, DUMP, "package/train.py")
    args = ["a b", "--lr=${local_rank}", "--x", "${unknown}", "$local_rank", "--", "-m", ""]
    words = [word.format(folder=tmp_path) for word in how]
    # torchrun runs a path inside a process of multiprocessing: what is that one's own is not compared.
    only = {"argv", "cwd", "file", "name", "isatty", "signals", "mask", "threads"} if "--run-path" in how else None
    ours = compare(["--nproc-per-node", "2", *words, *args], tmp_path, only=only)
    assert "--lr=1" in ours[1]["argv"]


@pytest.mark.parametrize("value", ["", "extra", "extra:", ":extra:other"])
def test_pythonpath_is_the_users_own(value: str, tmp_path: Path) -> None:
    """A PYTHONPATH of the user's is what the script sees, in the variable and in sys.path; ours leaves no trace."""
    write_script(tmp_path, DUMP)
    (tmp_path / "extra").mkdir()
    compare(["train.py"], tmp_path, {"PYTHONPATH": value})


def test_only_the_recorders_modules_are_loaded_before_the_script(tmp_path: Path) -> None:
    """No module is there before the script's first line that plain Python does not load, save the recorder's few."""
    write_script(tmp_path, "import sys; print(sorted(sys.modules))")
    plain = subprocess.run([sys.executable, "-u", "train.py"], cwd=tmp_path, env=make_env(), capture_output=True, text=True, check=True)  # fmt: skip
    ours = run_rankwise(["train.py"], tmp_path)
    extra = set(eval(ours.out)) - set(eval(plain.stdout))
    assert not {name for name in extra if name.startswith("rankwise")}, extra
    assert "sitecustomize" not in extra
    assert len(extra) < 45
    assert not extra & {
        "torch",
        "numpy",
        "logging",
        "subprocess",
        "socket",
        "asyncio",
        "typing_extensions",
    }, extra


def test_the_users_sitecustomize_runs_once_and_first(tmp_path: Path) -> None:
    """A sitecustomize of the user's own still runs in every rank, once, and is the module of that name.

    One that looks at the environment must not run in the warm server, which is no rank: a line says so.
    """
    write_script(tmp_path, "import os\nif 'RANK' in os.environ: print('custom site')\nX = 7", "site/sitecustomize.py")
    write_script(tmp_path, "import sitecustomize; print(sitecustomize.X, sitecustomize.__file__)")
    result = run_rankwise(["train.py"], tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert result.out.splitlines() == ["custom site", f"7 {tmp_path / 'site' / 'sitecustomize.py'}"]
    assert result.err == (
        f"rankwise: cold start: {tmp_path / 'site' / 'sitecustomize.py'} acts for each process: environ\n"
    )


def test_a_sitecustomize_that_fails_behaves_as_without_us(tmp_path: Path) -> None:
    """Python reports an error in the user's sitecustomize and goes on, with us as without; the recorder is armed."""
    write_script(tmp_path, "raise ValueError('mine')", "site/sitecustomize.py")
    write_script(tmp_path, "print('still here')")
    env: dict[str, str | None] = {"PYTHONPATH": str(tmp_path / "site")}
    result = run_rankwise(["train.py"], tmp_path, env=env)
    assert (result.code, result.out) == (0, "still here\n")
    assert "Error in sitecustomize" in result.err
    assert "ValueError: mine" in result.err


def test_a_sitecustomize_whose_import_is_missing_behaves_as_without_us(tmp_path: Path) -> None:
    """A user's sitecustomize that imports a missing module is reported by Python just as without us."""
    write_script(tmp_path, "import not_there_at_all", "site/sitecustomize.py")
    write_script(tmp_path, "print('still here')")
    env: dict[str, str | None] = {"PYTHONPATH": str(tmp_path / "site")}
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=make_env(env), capture_output=True, text=True, check=True)  # fmt: skip
    result = run_rankwise(["train.py"], tmp_path, env=env)
    assert result.out == plain.stdout
    assert result.err.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_what_a_rank_starts_knows_nothing_of_us(tmp_path: Path) -> None:
    """Subprocesses of a rank get no RANKWISE_* variable, no hook folder and none of the recorder's descriptors."""
    write_script(
        tmp_path,
        """
        import json, os, subprocess, sys
        code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path, sorted(map(int, os.listdir('/proc/self/fd')))]))"
        for options in ({}, {"close_fds": False}):
            env, path, fds = json.loads(subprocess.check_output([sys.executable, "-c", code], **options))
            assert not [name for name in env if name.startswith("RANKWISE") and "RESIDENT" not in name], env
            assert "PYTHONPATH" not in env
            assert not [entry for entry in path if "rankwise" in entry and "hook" in entry], path
            assert max(fds) < 20, fds
        shell = subprocess.check_output("env", shell=True, text=True)
        assert "RANKWISE" not in shell.replace("RANKWISE_RESIDENT", "")
        print("clean")
        """,
    )
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "clean\nclean\n"), result.err


def test_forked_children_and_their_exit_say_nothing_in_the_ranks_name(tmp_path: Path) -> None:
    """A forked child that raises, exits or crashes is not taken for the rank."""
    write_script(
        tmp_path,
        """
        import multiprocessing, os, signal
        def boom(): raise ValueError("in a child")
        def crash(): os.kill(os.getpid(), signal.SIGSEGV)
        context = multiprocessing.get_context("fork")
        for target in (boom, crash):
            child = context.Process(target=target); child.start(); child.join()
            print(child.exitcode, flush=True)
        if os.fork() == 0: raise KeyError("forked")
        os.wait()
        """,
    )
    result = run_rankwise(["--report", "report.json", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "1\n-11\n"), result.err
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "ok"


@pytest.mark.parametrize("ranks", [1, 2])
def test_threads_are_the_cores_divided_by_the_ranks(ranks: int, tmp_path: Path) -> None:
    """OMP_NUM_THREADS = cores allowed to the job / ranks, at least 1, and unset for one rank: affinity counts, and an own value is kept."""
    write_script(tmp_path, "import os; os.write(1, os.environ.get('OMP_NUM_THREADS', 'None').encode() + b' ')")
    args = ["--nproc-per-node", str(ranks), "train.py"]
    from rankwise.base.host import share_cores

    share = share_cores(ranks)
    assert run_rankwise(args, tmp_path).out.split() == [str(share)] * ranks
    one_cpu = {min(os.sched_getaffinity(0))}
    running = Running([*RANKWISE, *args], tmp_path, preexec_fn=lambda: os.sched_setaffinity(0, one_cpu))
    assert running.finish().out.split() == ["None" if share is None else "1"] * ranks
    assert run_rankwise(args, tmp_path, env={"OMP_NUM_THREADS": "7"}).out.split() == ["7"] * ranks


@pytest.mark.parametrize("visible", [None, "4,6", "GPU-a,GPU-b"])
def test_virtual_local_rank(visible: str | None, tmp_path: Path) -> None:
    """With --virtual-local-rank every rank is local rank 0 on a GPU of its own, as under torchrun."""
    # In one piece: an unbuffered print writes each word by itself, and ranks come in between.
    names = ["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"]
    script = f"import os; os.write(1, (' '.join(os.environ[name] for name in {names}) + chr(10)).encode())"
    write_script(tmp_path, script)
    args = ["--nproc-per-node", "2", "--virtual-local-rank", "train.py"]
    results = [run_rankwise(args, tmp_path, env={"CUDA_VISIBLE_DEVICES": visible}, launcher=which) for which in (RANKWISE, TORCHRUN)]  # fmt: skip
    assert results[0].code == 0, results[0].err
    assert sorted(results[0].out.splitlines()) == sorted(results[1].out.splitlines())


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 0), ("sys.exit(None)", 0), ("sys.exit(255)", 255)])
def test_the_exit_code_is_the_ranks(end: str, code: int, tmp_path: Path) -> None:
    """The launcher exits with the code of a rank: 0 in both spellings, and the largest; test_report.py has those of all other ends."""
    write_script(
        tmp_path,
        f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {end}
        elif {code}:
            time.sleep(30)
        """,
    )
    assert run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path).code == code


def test_output_is_what_torchrun_passes_on(tmp_path: Path) -> None:
    """Standard output of a plain script is byte for byte torchrun's, binary and half lines included."""
    write_script(
        tmp_path,
        r"""
        import os, sys, time
        sys.stdout.buffer.write(b"\xff\x00\rhalf"); print("line\ttab", "ü", flush=True)
        print("no newline at the end", end="")
        print("err", file=sys.stderr)
        """,
    )
    ours, theirs = (run_rankwise(["train.py"], tmp_path, launcher=which) for which in (RANKWISE, TORCHRUN))
    assert ours.out == theirs.out
    assert ours.err == theirs.err == "err\n"


def test_ranks_meet_and_reduce(tmp_path: Path) -> None:
    """Four ranks meet at the store that the launcher serves and sum a tensor."""
    write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)]); dist.all_reduce(total)
        dist.destroy_process_group()
        print(f"{int(total)}\\n", end="")
        """,
    )
    result = run_rankwise(["--nproc-per-node", "4", "train.py"], tmp_path)
    assert (result.code, result.out.split()) == (0, ["10"] * 4), result.err


def test_role_id_and_pet_variables(tmp_path: Path) -> None:
    """--role and --rdzv-id reach the ranks; PET_* variables stand in for absent flags, and a flag beats them."""
    names = ["ROLE_NAME", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "MASTER_ADDR"]
    write_script(tmp_path, f"import os, sys; sys.stdout.write(' '.join(os.environ[n] for n in {names}) + chr(10))")
    pet: dict[str, str | None] = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "actor", "PET_MAX_RESTARTS": "4", "PET_RDZV_ID": "job7",
                                  "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}  # fmt: skip
    flags = ["--role", "critic", "--rdzv_id=9", "--nproc-per-node=1", "train.py"]
    for args, expected in ((["train.py"], ["actor", "job7", "2", "4"]), (flags, ["critic", "9", "1", "4"])):
        ours, theirs = (run_rankwise(args, tmp_path, env=pet, launcher=which) for which in (RANKWISE, TORCHRUN))
        assert ours.out.split()[:4] == expected, ours.err
        assert ours.out.split() == theirs.out.split()


def test_a_pet_switch_is_a_number(tmp_path: Path) -> None:
    """PET_MODULE=1 and PET_NO_PYTHON=1 act as their flags."""
    write_script(tmp_path, "print('as module', __spec__ is not None)")
    assert run_rankwise(["train"], tmp_path, env={"PET_MODULE": "1"}).out == "as module True\n"
    assert run_rankwise(["/bin/echo", "hi"], tmp_path, env={"PET_NO_PYTHON": "1"}).out == "hi\n"


def test_a_given_port_is_used_on_every_address_asked(tmp_path: Path) -> None:
    """--master-addr and --master-port are what the ranks are told."""
    from support import free_port

    port = free_port()
    write_script(tmp_path, "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    result = run_rankwise(["--master-addr", "127.0.0.1", "--master-port", str(port), "train.py"], tmp_path)
    assert result.out == f"127.0.0.1 {port}\n"


def test_many_arguments_and_a_large_environment(tmp_path: Path) -> None:
    """A command too long for one message to the supervisor still starts."""
    write_script(tmp_path, "import os, sys; print(len(sys.argv), len(os.environ['BIG']), len(sys.argv[-1]))")
    words = [f"--option-{number}={'v' * 60}" for number in range(2000)]
    result = run_rankwise(["train.py", *words, "x" * 100_000], tmp_path, env={"BIG": "y" * 100_000})
    assert (result.code, result.out) == (0, "2002 100000 100000\n"), result.err


def test_no_terminal_streams_closed(tmp_path: Path) -> None:
    """A launcher started with all three streams closed (a daemon's) still runs the job."""
    write_script(tmp_path, "open('done', 'w').write('x'); print('hello')")

    def close_all() -> None:
        for fd in range(3):
            os.close(fd)

    running = Running([*RANKWISE, "train.py"], tmp_path, preexec_fn=close_all)
    assert running.finish().code in (0, 1)
    assert (tmp_path / "done").exists()


def test_parent_never_imports_torch(tmp_path: Path) -> None:
    """The launcher's own process runs a job without torch or numpy in it."""
    code = "import sys; from rankwise.cli.main import main; code = main(['run', 'train.py']); print('torch' in sys.modules, 'numpy' in sys.modules); sys.exit(code)"
    write_script(tmp_path, "pass")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=make_env(), capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "False False\n"


def test_on_a_terminal_the_dump_is_torchruns_too(tmp_path: Path) -> None:
    """On a terminal, streams, sessions and signals of a rank are torchrun's."""
    write_script(tmp_path, DUMP)
    seen = []
    for number, which in enumerate((RANKWISE, TORCHRUN)):
        to = tmp_path / f"to{number}"
        to.mkdir()
        with Terminal([*which, "train.py"], tmp_path, {"DUMP_TO": str(to)}) as terminal:
            assert terminal.finish().code == 0, terminal.text
        facts = json.loads((to / "0.json").read_text())
        seen.append(
            {name: facts[name] for name in ("isatty", "streams", "signals", "mask", "next_fd", "session_leader")}
        )
    assert seen[0] == seen[1]
