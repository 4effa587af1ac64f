"""The probes of Python, torch and the script: on told hosts, and on the real interpreter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import gpu_texts as texts
from fake_hosts import look, make_host
from rankwise.doctor.examine import collect_facts, compare_hosts
from rankwise.doctor.host import Host, JobShape, run_program
from rankwise.doctor.probes import interpreter, script, torch_build
from rankwise.doctor.torch_facts import Device, TorchFacts, query_torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankwise.doctor.probe import Probe, Reading

H100S = (Device(name="NVIDIA H100 80GB HBM3", capability="9.0"),) * 8
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
GPU_HOST = {texts.LIST: texts.list_h100(), "nvidia-smi": texts.HEAD_OLD}
PYTHON = "/opt/env/bin/python"


def tell_torch(**changes: object) -> TorchFacts:
    """What a healthy torch on a host with eight H100 says."""
    facts: dict[str, object] = {
        "python": PYTHON, "python_version": "3.11.9", "version": "2.9.0+cu126", "folder": "/opt/env/lib/python3.11/site-packages/torch",
        "cuda": "12.6", "nccl": "2.27.5", "devices": H100S, "archs": ARCHS, "backends": ("gloo", "nccl"),
        "wheels": ("torch 2.9.0+cu126 in /opt/env/lib/python3.11/site-packages", "nvidia-nccl-cu12 2.27.5 in /opt/env/lib/python3.11/site-packages"),
        "nccl_file": "/opt/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
    }  # fmt: skip
    return TorchFacts(**{**facts, **changes})  # type: ignore[arg-type]


def compare(probe: Probe, hosts: list[Host]) -> list[Reading]:
    return compare_hosts([probe], {host.name: collect_facts(look(probe, host)) for host in hosts})


def bad(probe: Probe, host: Host) -> list[Reading]:
    return [one for one in look(probe, host) if one.verdict in {"warn", "fail"}]


def test_the_real_interpreter_is_fine() -> None:
    """The interpreter of the tests has torch, and none of the probes of software finds fault with it."""
    host = Host(env={"PATH": ""}, job=JobShape(python=sys.executable))
    (told,) = look(interpreter.PROBE, host)
    assert told.verdict == "ok"
    assert told.facts["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [one.what for one in bad(torch_build.PROBE, host)] == []
    assert any(one.startswith("torch ") for one in host.ask(query_torch).wheels)


@pytest.mark.parametrize(
    ("why", "verdict", "fix"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "fail", f"{PYTHON} -m pip install torch"), ("ImportError: libcudart.so.12: cannot open shared object file", "fail", "import torch"),
        (f"{PYTHON} can't be run: No such file or directory", "fail", "name the interpreter"), (f"{PYTHON} did not end within 90 s", "skipped", ""), ("not asked", "skipped", ""),
    ],
)  # fmt: skip
def test_an_interpreter_without_torch(tmp_path: Path, why: str, verdict: str, fix: str) -> None:
    """Ranks whose interpreter has no torch fail, with the error they would end with; what is only late is no failure."""
    (told,) = look(interpreter.PROBE, make_host(tmp_path, torch=TorchFacts(python=PYTHON, why=why)))
    assert told.verdict == verdict
    assert fix in told.fix
    assert [
        one.verdict for one in look(torch_build.PROBE, make_host(tmp_path, torch=TorchFacts(python=PYTHON, why=why)))
    ] == ["skipped"]


@pytest.mark.parametrize(
    ("first_line", "is_other"),
    [
        ("#!/usr/bin/python3\n", True), ("#!/opt/env/bin/python3.11\n", False), ("#!/usr/bin/env python3\n", True), ("#!/usr/bin/env bash\n", False),
        ("#!/bin/sh\n'''exec' \"/usr/bin/python3\" \"$0\" \"$@\"\n", True), ("\x7fELF", False),
    ],
)  # fmt: skip
def test_torchrun_of_another_environment(tmp_path: Path, first_line: str, is_other: bool) -> None:
    """A torchrun on PATH that starts another environment's Python is told; the same environment's, and a shim, are not."""
    files = {
        "/usr/local/bin/torchrun": first_line,
        "/usr/bin/python3": "",
        "/opt/env/bin/python": "",
        "/opt/env/bin/torchrun": "",
    }
    host = make_host(tmp_path, files=files, env={"PATH": "/usr/local/bin:/usr/bin"}, torch=tell_torch())
    found = bad(interpreter.PROBE, host)
    assert [one.class_id for one in found] == ["L17"] * is_other
    if is_other:
        assert "/usr/bin/python3" in found[0].what
        assert found[0].fix == 'export PATH="/opt/env/bin:$PATH"'


def test_rankwise_of_another_environment(tmp_path: Path) -> None:
    """A rankwise on PATH that starts another environment's Python is told, too."""
    files = {
        "/usr/local/bin/rankwise": "#!/usr/bin/python3\n",
        "/opt/env/bin/torchrun": "#!/opt/env/bin/python\n",
    }
    host = make_host(tmp_path, files=files, env={"PATH": "/usr/local/bin:/opt/env/bin"}, torch=tell_torch())
    (told,) = bad(interpreter.PROBE, host)
    assert told.what.startswith("rankwise on PATH is /usr/local/bin/rankwise, which starts /usr/bin/python3")


def test_a_folder_without_the_program_comes_not_first(tmp_path: Path) -> None:
    """Where the ranks' interpreter has no such program beside it, PATH can't mend it: the interpreter starts the module itself."""
    files = {f"/usr/local/bin/{name}": "#!/usr/bin/python3\n" for name in ("torchrun", "rankwise")}
    host = make_host(tmp_path, files=files, env={"PATH": "/usr/local/bin"}, torch=tell_torch())
    assert [one.fix for one in bad(interpreter.PROBE, host)] == [
        f"{PYTHON} -m torch.distributed.run …  # instead of torchrun",
        f"{PYTHON} -m rankwise …  # instead of rankwise",
    ]


def test_an_interpreter_that_can_run_no_rank_is_put_on_no_path(tmp_path: Path) -> None:
    """One that is missing, or has no torch, is told alone: nobody should put it before the others."""
    files = {"/usr/local/bin/torchrun": "#!/usr/bin/python3\n", "/opt/env/bin/torchrun": ""}
    for why in (
        f"{PYTHON} can't be run: No such file or directory",
        "ModuleNotFoundError: No module named 'torch'",
    ):
        torch = TorchFacts(python=PYTHON, why=why)
        host = make_host(tmp_path, files=files, env={"PATH": "/usr/local/bin"}, torch=torch)
        assert [one.verdict for one in bad(interpreter.PROBE, host)] == ["fail"]


def test_hosts_with_another_python_or_torch(tmp_path: Path) -> None:
    """The hosts that differ are named with both values; the third number of Python's version does not matter."""
    hosts = [make_host(tmp_path / name, torch=tell_torch(), name=name) for name in "ab"]
    hosts.append(make_host(tmp_path / "c", torch=tell_torch(python_version="3.11.4"), name="c"))
    assert compare(interpreter.PROBE, hosts) == []
    hosts.append(make_host(tmp_path / "d", torch=tell_torch(python_version="3.10.2", version="2.8.0+cu126"), name="d"))
    python, torch = compare(interpreter.PROBE, hosts)
    assert (python.what, python.hosts, python.class_id) == (
        "Python differs: 3.11: a, b, c; 3.10: d",
        ("d",),
        "R11",
    )
    assert (torch.what, torch.hosts) == ("torch differs: 2.9.0+cu126: a, b, c; 2.8.0+cu126: d", ("d",))


def test_two_hosts_that_differ_are_both_named(tmp_path: Path) -> None:
    """Of two hosts none is the odd one."""
    hosts = [
        make_host(tmp_path / name, torch=tell_torch(version=version), name=name)
        for name, version in (("a", "2.9.0"), ("b", "2.8.0"))
    ]
    assert [one.hosts for one in compare(interpreter.PROBE, hosts)] == [("a", "b")]


def test_a_build_that_fits_is_quiet(tmp_path: Path) -> None:
    """A build for the GPUs and the driver is told in one reading, with what other hosts are compared with."""
    (told,) = look(torch_build.PROBE, make_host(tmp_path, torch=tell_torch(), programs=GPU_HOST))
    assert told.what == "torch 2.9.0+cu126 is built for CUDA 12.6, NCCL 2.27.5, driver 550.54.15"
    assert told.facts == {
        "cuda": "12.6",
        "nccl": "2.27.5",
        "driver": "550.54.15",
        "plugin": "",
        "torch": "2.9.0+cu126",
    }


@pytest.mark.parametrize(
    ("backend", "programs", "verdicts"),
    [
        ("nccl", GPU_HOST, ["fail"]),
        ("", GPU_HOST, ["warn"]),
        ("gloo", GPU_HOST, []),
        ("nccl", {}, ["fail"]),
        ("", {}, []),
    ],
)
def test_a_build_for_the_cpu(tmp_path: Path, backend: str, programs: Mapping[str, str], verdicts: list[str]) -> None:
    """A build for the CPU is a fault where there are GPUs, or where the job asks for NCCL; elsewhere it is right."""
    host = make_host(
        tmp_path,
        torch=tell_torch(version="2.9.0+cpu", cuda="", nccl="", devices=(), archs=()),
        programs=programs,
        job=JobShape(backend=backend),
    )
    found = bad(torch_build.PROBE, host)
    assert [one.verdict for one in found] == verdicts
    assert {one.class_id for one in found} <= {"I17"}


def test_a_build_for_a_newer_cuda_than_the_driver(tmp_path: Path) -> None:
    """Torch of CUDA 13 finds no GPU under a driver of CUDA 12: the fix installs a build for that."""
    torch = tell_torch(
        version="2.9.0+cu130",
        cuda="13.0",
        devices=(),
        cuda_error="RuntimeError: The NVIDIA driver on your system is too old",
    )
    (told,) = bad(torch_build.PROBE, make_host(tmp_path, torch=torch, programs=GPU_HOST))
    assert told.verdict == "fail"
    assert "serves CUDA 12.4" in told.what
    assert "/cu126" in told.fix


def test_hidden_gpus_are_no_fault_of_torch(tmp_path: Path) -> None:
    """Where CUDA_VISIBLE_DEVICES hides all GPUs, torch is right to see none."""
    host = make_host(tmp_path, torch=tell_torch(devices=()), programs=GPU_HOST, env={"CUDA_VISIBLE_DEVICES": ""})
    assert bad(torch_build.PROBE, host) == []


@pytest.mark.parametrize(
    ("archs", "capability", "fits"),
    [
        (("sm_80", "sm_90"), "8.9", True), (("sm_80", "sm_90"), "12.0", False), (("sm_80", "compute_90"), "12.0", True), (("sm_90a",), "9.0", True),
        (("sm_90a",), "10.0", False), (("sm_86",), "8.0", False), (("sm_100", "sm_120"), "10.3", True), (("gfx942",), "9.4", True),
    ],
)  # fmt: skip
def test_code_for_a_gpu(archs: tuple[str, ...], capability: str, fits: bool) -> None:
    """Code runs on later GPUs of its generation, and what is meant to be compiled there on all later ones."""
    assert torch_build.serves(archs, capability) == fits


def test_a_gpu_newer_than_the_build(tmp_path: Path) -> None:
    """A GPU that the build has no code for is named with its architecture."""
    device = Device(name="NVIDIA GeForce RTX 5090", capability="12.0")
    torch = tell_torch(devices=(device,), archs=("sm_80", "sm_86", "sm_90"))
    (told,) = bad(torch_build.PROBE, make_host(tmp_path, torch=torch, programs=GPU_HOST))
    assert "RTX 5090 (sm_120)" in told.what


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wheels": ("torch 2.9.0 in /home/u/.local/lib", "torch 2.6.0 in /opt/env/lib")}, "several torch"),
        ({"wheels": ("torch 2.9.0 in /x", "nvidia-nccl-cu11 2.21.5 in /x", "nvidia-nccl-cu12 2.27.5 in /x")}, "several NCCL"),
        ({"nccl_file": "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3", "nccl": "2.18.3"}, "has loaded /usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3"),
    ],
)  # fmt: skip
def test_packages_in_each_others_way(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    """Two torch, two NCCL in one folder, and another NCCL than the installed one are told."""
    (told,) = bad(torch_build.PROBE, make_host(tmp_path, torch=tell_torch(**changes), programs=GPU_HOST))
    assert (told.verdict, told.class_id) == ("warn", "R11")
    assert says in told.what


def test_an_image_with_its_own_nccl_is_fine(tmp_path: Path) -> None:
    """An image whose torch was built with the system's NCCL has no second one."""
    torch = tell_torch(wheels=("torch 2.9.0 in /usr/lib",), nccl_file="/usr/lib/x86_64-linux-gnu/libnccl.so.2.27.5")
    assert bad(torch_build.PROBE, make_host(tmp_path, torch=torch, programs=GPU_HOST)) == []


def test_hosts_with_another_nccl_plugin_or_driver(tmp_path: Path) -> None:
    """NCCL and its plugin on some hosts only are failures, another driver is a warning; all hosts are named."""
    plugin = {"/opt/plugin/lib/libnccl-net.so": ""}
    hosts = [
        make_host(
            tmp_path / name,
            torch=tell_torch(),
            programs=GPU_HOST,
            name=name,
            files=plugin,
            env={"LD_LIBRARY_PATH": "/opt/plugin/lib"},
        )
        for name in "abc"
    ]
    assert compare(torch_build.PROBE, hosts) == []
    old = {
        texts.LIST: texts.list_h100().replace("550.54.15", "535.183.01"),
        "nvidia-smi": texts.HEAD_OLD,
        "/sbin/ldconfig -p": "\tlibc.so.6 => /lib/libc.so.6\n",
    }
    hosts.append(make_host(tmp_path / "d", torch=tell_torch(nccl="2.21.5"), programs=old, name="d"))
    found = compare(torch_build.PROBE, hosts)
    assert [(one.verdict, one.hosts) for one in found] == [
        ("fail", ("d",)),
        ("fail", ("d",)),
        ("warn", ("d",)),
    ]
    assert found[0].what == "NCCL differs: 2.27.5: a, b, c; 2.21.5: d"
    assert found[1].what == "NCCL's network plugin differs: libnccl-net.so: a, b, c; none: d"


def test_another_torch_is_told_once(tmp_path: Path) -> None:
    """Another torch brings another CUDA and NCCL: that is one fault, told by the probe of the interpreter."""
    hosts = [
        make_host(tmp_path / "a", torch=tell_torch(), name="a"),
        make_host(tmp_path / "b", torch=tell_torch(version="2.8.0", cuda="12.8", nccl="2.26.2"), name="b"),
    ]
    assert compare(torch_build.PROBE, hosts) == []
    assert len(compare(interpreter.PROBE, hosts)) == 1


def write_job(folder: Path, files: Mapping[str, str]) -> JobShape:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return JobShape(script=folder / "train.py")


JOB = {
    "train.py": "import os\nimport torch\nfrom model import net\nimport pkg.data as data\n", "model.py": "from pkg import data\n", "pkg/__init__.py": "",
    "pkg/data.py": "from . import deep\nfrom .deep import x\n", "pkg/deep.py": "x = 1\n", "scratch.py": "print(1)\n",
}  # fmt: skip


def test_the_files_of_a_script(tmp_path: Path) -> None:
    """A script is its file and what it imports from its own folder; what merely lies there is not of it."""
    job = write_job(tmp_path, JOB)
    (told,) = look(script.PROBE, Host(job=job))
    assert isinstance(told.facts["files"], dict)
    assert sorted(told.facts["files"]) == [
        "model.py",
        "pkg/__init__.py",
        "pkg/data.py",
        "pkg/deep.py",
        "train.py",
    ]
    (folder,) = look(script.PROBE, Host(job=JobShape(script=tmp_path)))
    assert isinstance(folder.facts["files"], dict)
    assert sorted(folder.facts["files"]) == sorted(JOB)


def test_hosts_with_another_script(tmp_path: Path) -> None:
    """An older copy of an imported module is found and named; another scratch file beside the script is not."""
    hosts = [Host(name=name, job=write_job(tmp_path / name, JOB)) for name in "abc"]
    (tmp_path / "c" / "scratch.py").write_text("print(2)\n")
    assert compare(script.PROBE, hosts) == []
    (tmp_path / "b" / "pkg" / "deep.py").write_text("x = 2\n")
    (told,) = compare(script.PROBE, hosts)
    assert (told.verdict, told.class_id, told.hosts) == ("fail", "X19", ("b",))
    assert told.what.startswith("pkg/deep.py differs: ")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    """A host without the script fails; a job without a name for it is skipped; a broken script is read all the same."""
    assert [one.verdict for one in look(script.PROBE, Host(job=JobShape(script=tmp_path / "none.py")))] == ["fail"]
    assert [one.verdict for one in look(script.PROBE, Host(job=JobShape()))] == ["skipped"]
    assert [one.verdict for one in look(script.PROBE, Host(job=write_job(tmp_path, {"train.py": "def ("})))] == ["ok"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
def test_a_program_that_hangs_is_left_to_itself() -> None:
    """A program that does not end in time is an answer, although what it has started still holds its output."""
    told = run_program(["sh", "-c", "echo begun; sleep 1000 & wait"], 0.3)
    assert (told.code, told.why) == (None, "sh did not end within 0 s")


def test_programs_that_end_and_that_are_missing() -> None:
    """A program's code and words come back; one that is not there is an answer, too."""
    told = run_program(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], 60.0
    )
    assert (told.code, told.out.strip(), told.err.strip(), told.is_good) == (3, "out", "err", False)
    assert run_program(["rankwise-has-no-such-program"], 5.0).why.startswith(
        "rankwise-has-no-such-program can't be run: "
    )
