"""Whether hosts have what a job asks for, and all the same: seen before anything is started on them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.ssh import SSH_FAILED, SSH_TRY_S, find_ssh_failure
from rankwise.cluster import host_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.cluster.job import JobSpec

Facts = dict[str, Any]
_HERE = "this machine"
#: So many hosts are spoken to at a time.
MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How hosts are looked at.

    Attributes:
        ways: For each host the words that have a shell there read a line.
        python: The cluster's own, where the user names none.
        address: Where the nodes will meet: all must know the name; empty: there is one node.
        port: There; the first host must have it.
        test: How a user sees whether a host is reached.
    """

    ways: Mapping[str, Sequence[str]]
    python: str
    address: str = ""
    port: int = 0
    test: str = ""


def check_hosts(spec: JobSpec, look: Look) -> None:
    """Look at all hosts at once.

    Raises:
        LaunchError: A host is not reached, or has no such Python.
        UsageError: A host lacks something, or the hosts differ: all that does is named at once.
    """
    facts = ask_all(spec, look)
    _check_each(spec, facts)
    _check_files(spec, facts)
    here = {} if _HERE in facts else _list_files_here(spec)
    _check_equal(facts, here)


def ask_all(spec: JobSpec, look: Look) -> dict[str, Facts]:
    """Return the facts of each host.

    Raises:
        LaunchError: One is not reached, or has no such Python.
        UsageError: There is no ssh here.
    """
    program = Path(host_facts.__file__).read_text(encoding="utf-8")
    first = next(iter(look.ways))

    def ask(host: str) -> tuple[str, int, str, str]:
        asked = {
            "workdir": spec.workdir,
            "makes_workdir": bool(spec.files),
            "words": spec.command,
            "address": look.address,
            "port": look.port,
            "is_first": host == first,
            "counts_gpus": spec.gpus_per_node > 0,
        }
        line = shlex.join([spec.python or look.python, "-", json.dumps(asked)])
        try:
            done = subprocess.run(
                [*look.ways[host], line],
                input=program,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SSH_TRY_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return host, SSH_FAILED, "", f"no answer within {SSH_TRY_S:.0f} s"
        return host, done.returncode, done.stdout, done.stderr

    try:
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(look.ways))) as pool:
            answers = list(pool.map(ask, look.ways))
    except OSError as error:
        word = look.ways[first][0]
        raise UsageError(
            f"{word} can't be run: {error.strerror}", hint=f"install {word}, or choose another cluster by --on"
        ) from error
    wrong = [_judge(host, code, err) for host, code, out, err in answers if code or not out.startswith("{")]
    if wrong:
        has_no_python = all(code in {126, 127} for _, code, *_ in answers if code)
        raise LaunchError(
            "; ".join(wrong), hint="name the Python of the hosts by python" if has_no_python else look.test or None
        )
    return {host: json.loads(out.splitlines()[-1]) for host, _, out, _ in answers}


def _judge(host: str, code: int, err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    if code == SSH_FAILED:
        return find_ssh_failure(host, lines)
    return f"{host}: {lines[-1] if lines else f'exit code {code}'}"


def _list_files_here(spec: JobSpec) -> dict[str, str]:
    """Return digests of the files of the command that are here, too: an edit that has not been copied is no edit there."""
    if not Path(spec.workdir).is_dir():
        return {}
    look = Look(ways={_HERE: ["sh", "-c"]}, python=sys.executable)
    found = ask_all(replace(spec, python="", gpus_per_node=0), look)[_HERE]["files"]
    return {name: digest for name, digest in found.items() if digest}


def _check_each(spec: JobSpec, facts: Mapping[str, Facts]) -> None:
    wrong: list[tuple[str, str]] = []
    for host, found in facts.items():
        if not found["workdir"]:
            wrong.append(
                (
                    f"{host} has no folder {spec.workdir}",
                    "name one that all hosts have by workdir, or have it made and filled by files",
                )
            )
        if found["rankwise"] is None:
            wrong.append((f"{host} has no rankwise in its Python", "install it there, or name its Python by python"))
        for word, have, want in (
            ("GPUs", found["gpus"], spec.gpus_per_node),
            ("cores", found["cpus"], spec.cpus_per_node),
        ):
            if want > have:
                wrong.append(
                    (f"{host} has {have} {word}, and the job asks for {want}", f"ask for {have}, or leave {host} out")
                )
        if spec.memory_bytes > found["memory_bytes"]:
            wrong.append(
                (
                    f"{host} has {found['memory_bytes'] >> 30} GiB of memory, and the job asks for {spec.memory_bytes >> 30}",
                    "ask for less",
                )
            )
        if found["rendezvous"]:
            wrong.append(
                (
                    f"{host}: {found['rendezvous']}",
                    "give an address that all hosts know by master_addr, and a free port by port",
                )
            )
    if wrong:
        raise UsageError("; ".join(what for what, _ in wrong), hint=wrong[0][1])


def _check_files(spec: JobSpec, facts: Mapping[str, Facts]) -> None:
    """See that the script is there, everywhere."""
    name = host_facts.find_script(spec.command)[0]
    missing = [host for host, found in facts.items() if name and found["files"].get(name) is None]
    if missing:
        raise UsageError(
            f"{name} is not in {spec.workdir} on {', '.join(missing)}",
            hint="have it copied by files, or change workdir",
        )


def _check_equal(facts: Mapping[str, Facts], here: Mapping[str, str]) -> None:
    shown = {
        host: {"Python": one["python"], "torch": one["torch"], "rankwise": one["rankwise"], **one["files"]}
        for host, one in facts.items()
    }
    different = []
    for name in dict.fromkeys(name for one in shown.values() for name in one):
        by_value: dict[str, list[str]] = {}
        for host, one in [*shown.items(), *([(_HERE, here)] if name in here else [])]:
            by_value.setdefault(one.get(name) or "missing", []).append(host)
        if len(by_value) > 1:
            different.append(
                f"{name} is " + ", ".join(f"{value} on {_list(hosts)}" for value, hosts in by_value.items())
            )
    if different:
        raise UsageError(
            "the hosts differ: " + "; ".join(different),
            hint="install the same versions everywhere; files, shown by the beginning of their SHA-256, are copied by --files",
        )


def _list(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) < 4 else f"{hosts[0]} and {len(hosts) - 1} more"
