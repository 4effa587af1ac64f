"""Which Python, and which torch, will run the ranks.

**Why it matters.** Each rank is a process of one interpreter, with the packages of that interpreter. Over ssh, in a batch script or under
`sudo` another one often comes first on `PATH` than in your terminal: the ranks then end with `ModuleNotFoundError: No module named 'torch'`, or
use an older torch that you have forgotten. Hosts with different versions may hang at the first collective, or much later.

**How it is checked.** The ranks' interpreter is started once and imports torch. The interpreter that `torchrun` and `rankwise` on `PATH`
belong to is read from their first lines. Between hosts, the version of Python (3.11, without the third number) and that of torch are compared.

**What to do.** Activate the environment in the job itself, or start the job by its full path: `/path/to/env/bin/rankwise run train.py`. Install the
same versions on all hosts, or start from a shared folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankwise.doctor.differences import report_difference
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Facts, Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.torch_facts import TorchFacts, query_torch


def look(host: Host) -> Iterator[Reading]:
    info = host.ask(query_torch)
    yield _report_torch(info)
    # Where torch is missing the ranks can't run on this interpreter, whatever stands on PATH.
    if not info.has_torch or not Path(info.python).is_absolute():
        return
    folder = Path(info.python).parent
    for name in ("torchrun", "rankwise"):
        launcher = find_program(host, name)
        python = _find_interpreter(host, launcher) if launcher else ""
        # In one folder python, python3 and python3.11 are the same; and /bin may be another name of /usr/bin.
        if python and host.path(python).parent.resolve() != host.path(info.python).parent.resolve():
            module = {"torchrun": "torch.distributed.run"}.get(name, name)
            has_own = host.path(f"{folder}/{name}").is_file()
            yield warn(
                f"{name} on PATH is {launcher}, which starts {python}; the ranks of this job run on {info.python}",
                f"a job started with {name} here uses the packages of another environment",
                f'export PATH="{folder}:$PATH"' if has_own else f"{shlex.quote(info.python)} -m {module} …  # instead of {name}", "L17"
            )  # fmt: skip


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    why = "ranks of different versions hang at their first collective, or fail much later, at an object that the other can't read"
    fix = "# use Python {most} on all of these hosts"
    yield from report_difference(facts, "python", "Python differs", why, fix, "R11")
    fix = "python -m pip install torch=={most}  # there"
    yield from report_difference(facts, "torch", "torch differs", why, fix, "R11")


def _report_torch(info: TorchFacts) -> Reading:
    minor = ".".join(info.python_version.split(".")[:2])
    if info.has_torch:
        what = f"Python {info.python_version} ({info.python}), torch {info.version} in {info.folder}"
        return ok(what, python=minor, torch=info.version, interpreter=info.python, folder=info.folder)
    if "did not end" in info.why or info.why == "not asked":
        return skipped(
            f"torch could not be queried: {info.why}", "an import of torch takes seconds; a disk or a driver does not answer in time",
        )  # fmt: skip
    is_absent = "No module named 'torch'" in info.why
    install = f"{info.python} -m pip install torch" if is_absent else f'{info.python} -c "import torch"'
    is_missing = "can't be run" in info.why
    return fail(
        f"{info.python} " + ("can't be started: " if is_missing else "can't import torch: ") + info.why, "each rank here ends at once with this error",
        "# name the interpreter of the environment that has torch" if is_missing else f"{install}  # or use another environment's Python", "L17",
        facts={"python": minor, "interpreter": info.python}
    )  # fmt: skip


def find_program(host: Host, name: str) -> str:
    """Return the file that a shell would start for a name; empty for none."""
    for folder in host.env.get("PATH", "").split(":"):
        if folder.startswith("/") and host.path(f"{folder}/{name}").is_file():
            return f"{folder}/{name}"
    return ""


def _find_interpreter(host: Host, launcher: str) -> str:
    head = host.read(launcher).splitlines()[:2]
    if not head or not head[0].startswith("#!"):
        return ""
    # Of a long path pip makes a script of the shell: its second line holds the interpreter.
    line = head[0][2:] if not head[0].startswith("#!/bin/sh") else (head[1:] or [""])[0]
    words = re.findall(r"[^\s'\"]+", line)
    found = next((word for word in words if Path(word).name.startswith(("python", "pypy"))), "")
    return found if found.startswith("/") or not found else find_program(host, found)


PROBE = Probe(
    "interpreter", "Python and torch of the ranks", "software", "slow", look, classes=("L17", "R11"), compare=compare
)
