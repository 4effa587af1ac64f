"""Look at a command before anything is started: most lost hours begin in the command line.

Each check is a function of what was typed and of this host; it gives a Finding or nothing. Errors stop the
start, warnings are printed above the run.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.findings import Finding
from rankwise.base.host import count_gpus, is_loopback, is_unspecified
from rankwise.base.similar_paths import find_near

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.launcher.spec import LaunchSpec

# Flags that only a launcher has. Others (--role, --log-dir, --module …) are common in scripts.
_LAUNCHER_ONLY = {
    f"--{name}"
    for name in (
        "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint",
        "rdzv-id", "rdzv-conf", "standalone", "max-restarts", "monitor-interval", "local-ranks-filter",
    )
}  # fmt: skip
_DEVICES = {"gpu", "cpu", "auto", "xpu"}


def check_command(spec: LaunchSpec, argv: Sequence[str] = ()) -> list[Finding]:
    """Return all that is wrong or doubtful with a command, errors first.

    Args:
        spec: The command, parsed.
        argv: The command as typed, after ``run``.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        gone = "the current folder does not exist any more"
        return [Finding(id="", severity="error", what=gone, fix="change to one that does: cd …")]
    checks = (
        _check_nproc,
        _check_files,
        _check_script,
        _check_late_flags,
        _check_rendezvous,
        _check_ignored,
        _check_gpus,
    )
    found = [finding for check in checks for finding in check(spec, argv)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def _check_nproc(spec: LaunchSpec, _argv: Sequence[str]) -> Iterator[Finding]:
    value = spec.nproc_per_node
    if spec.num_ranks:
        return
    if value in _DEVICES or re.fullmatch(r"[a-z][a-z0-9_]*", value):
        return
    yield Finding(
        id="L4",
        severity="error",
        what=f"{_spelled(spec, '--nproc-per-node')} {value!r} is not a number of ranks",
        fix="a number above 0, gpu, cpu, xpu or auto"
        + ("" if re.fullmatch(r"-?\d+", value) else "; did the flag lose its value?"),
    )


def _spelled(spec: LaunchSpec, flag: str) -> str:
    """Return a flag as the user gave it: typed, or by its variable."""
    return f"PET_{flag[2:].replace('-', '_').upper()}" if flag in spec.by_variable else flag


def _check_files(spec: LaunchSpec, _argv: Sequence[str]) -> Iterator[Finding]:
    """After days of training it is too late to learn that the report has no place."""
    if spec.report is not None and not os.access(spec.report.absolute().parent, os.W_OK):
        yield Finding(
            id="",
            severity="error",
            what=f"--report {spec.report}: its folder does not exist or can't be written",
            fix="make the folder first",
        )
    if spec.report is not None and spec.report.is_dir():
        yield Finding(
            id="",
            severity="error",
            what=f"--report {spec.report}: that is a folder",
            fix=f"name a file, such as {spec.report / 'report.json'}",
        )
    shown, ranks = spec.logs.shown_ranks, spec.num_ranks
    if shown and ranks and not shown.intersection(range(ranks)):
        yield Finding(
            id="",
            severity="warning",
            what="--local-ranks-filter names none of this node's ranks, so no output is shown",
            fix=f"name some of 0 to {ranks - 1}",
        )


def _check_script(spec: LaunchSpec, _argv: Sequence[str]) -> Iterator[Finding]:
    program = spec.program
    script, path = program.script, Path(program.script)
    if program.how == "module":
        if script.endswith(".py") and path.exists():
            module = script[:-3].replace("/", ".")
            yield Finding(
                id="L4",
                severity="error",
                what=f"-m takes a module's name, and {script!r} is a file",
                fix=f"-m {module}, or leave out -m",
            )
        return
    if program.how == "program":
        if shutil.which(script) is None:
            yield Finding(
                id="L4",
                severity="error",
                what=f"no program {script!r} is found",
                fix="give its path, or leave out --no-python for a Python script",
            )
        return
    if program.how == "run_path" and not path.is_absolute():
        yield Finding(
            id="L4",
            severity="error",
            what=f"--run-path needs an absolute path, but {script!r} is not",
            fix=f"give {path.absolute()}",
        )
    elif path.is_dir():
        if not (path / "__main__.py").exists():
            yield Finding(
                id="L4",
                severity="error",
                what=f"{script!r} is a folder without __main__.py",
                fix="name the script in it",
            )
    elif not path.exists():
        yield Finding(id="L4", severity="error", what=f"no script {script!r} in {Path.cwd()}", fix=_guess(script))


def _guess(script: str) -> str:
    if re.fullmatch(r"python[\d.]*", script):
        return f"leave out {script!r}: the script runs in the Python that rankwise runs in"
    if script.startswith("torch") or script in {"rankwise", "accelerate"}:
        return f"a second command begins at {script!r}: keep one of the two"
    if re.fullmatch(r"[\w.]+", script) and "." in script and not script.endswith(".py"):
        return f"for a module: -m {script}"
    near = find_near(Path(script))
    return f"did you mean {near}?" if near else "check the path, and the current folder"


def _check_late_flags(spec: LaunchSpec, argv: Sequence[str]) -> Iterator[Finding]:
    if "--" in argv[: len(argv) - len(spec.program.args)]:
        return  # the user said where the launcher's flags end
    for word in spec.program.args:
        flag = word.split("=", 1)[0]
        if flag.replace("_", "-") not in _LAUNCHER_ONLY or _knows(spec, flag.lstrip("-")):
            continue
        yield Finding(
            id="L3",
            severity="error",
            what=f"{word} comes after the script, so it would go to {spec.program.script} and not to the launcher",
            fix=f"put it before {spec.program.script}; if the script does take it: rankwise run [flags] -- "
            f"{spec.program.script} …",
        )
        return


def _knows(spec: LaunchSpec, name: str) -> bool:
    """Tell whether the code of the script, or of a file beside it, has an option or a variable of that name."""
    if spec.program.how not in {"script", "run_path"}:
        return True  # a module or a program may be anything: no ground for a refusal
    script = Path(spec.program.script)
    files = [script]
    for folder in dict.fromkeys((script.parent.absolute(), Path.cwd())):
        files += [*sorted(folder.glob("*.py"))[:200], *sorted(folder.glob("*/*.py"))[:200]]
    wanted = name.replace("-", "_")
    return any(wanted in _names_in(file, wanted) for file in files)


def _names_in(file: Path, wanted: str) -> set[str]:
    """Return the identifiers and options in a file's code; prose about them, as in a docstring, does not count."""
    try:
        text = file.read_text(errors="replace")
        if wanted not in text.replace("-", "_"):
            return set()
        tree = ast.parse(text)
    except OSError:
        return set()
    except (SyntaxError, ValueError):
        return {wanted}  # unreadable: no ground for a refusal
    names = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            names.add(getattr(node, field, None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.lstrip("-").replace("-", "_"))
    return {name for name in names if isinstance(name, str)}


def _check_rendezvous(spec: LaunchSpec, argv: Sequence[str]) -> Iterator[Finding]:
    rendezvous = spec.rendezvous
    if spec.is_one_node:
        return
    if rendezvous.backend == "static":
        if spec.min_nodes != spec.max_nodes:
            yield Finding(
                id="L10",
                severity="error",
                what=f"--nnodes {spec.min_nodes}:{spec.max_nodes} is a range, but the static rendezvous takes one number",
                fix="give one number, or --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
            )
        if not 0 <= spec.node_rank < spec.max_nodes:
            yield Finding(id="I11", severity="error",
                          what=f"--node-rank {spec.node_rank} with --nnodes {spec.max_nodes}: nodes are numbered from 0",
                          fix=f"0 to {spec.max_nodes - 1}, a different one on each node")  # fmt: skip
        # All of a host's addresses: node 0 can listen there, and the others would look for it on themselves.
        addr = spec.master_addr or ""
        if is_loopback(addr) or (is_unspecified(addr) and spec.node_rank != 0):
            given = not _chosen(spec, argv).isdisjoint({"--master-addr", "--rdzv-endpoint"})
            yield Finding(
                id="I4",
                severity="warning" if given else "error",
                what=f"{spec.max_nodes} nodes would rendezvous at {spec.master_addr}, which is a different host on each of them",
                fix="--master-addr ADDRESS-OF-NODE-0"
                + ("" if given else "; if all nodes are on this host: --master-addr 127.0.0.1"),
            )
    elif not rendezvous.endpoint and rendezvous.backend == "c10d":
        yield Finding(
            id="I21",
            severity="error",
            what="--rdzv-backend c10d without --rdzv-endpoint on several nodes",
            fix="--rdzv-endpoint HOST:PORT, where HOST is what one of the nodes calls itself",
        )


def _check_ignored(spec: LaunchSpec, argv: Sequence[str]) -> Iterator[Finding]:
    if spec.rendezvous.backend == "static":
        return
    for flag in sorted(_chosen(spec, argv) & {"--node-rank", "--master-addr", "--master-port"}):
        yield Finding(id="L9", severity="warning",
                      what=f"{flag} is not used with --rdzv-backend {spec.rendezvous.backend}",
                      fix="leave it out, or use the static rendezvous")  # fmt: skip


def _chosen(spec: LaunchSpec, argv: Sequence[str]) -> set[str]:
    """Return the launcher's flags that the user chose, typed or by a PET_* variable, in torchrun's new spelling."""
    typed = (word.split("=", 1)[0] for word in argv[: len(argv) - len(spec.program.args)])
    return {flag.replace("_", "-") for flag in typed} | spec.by_variable


def _check_gpus(spec: LaunchSpec, argv: Sequence[str]) -> Iterator[Finding]:
    gpus = count_gpus()
    ranks = spec.num_ranks
    if not gpus or ranks is None:
        return
    asked = "--nproc-per-node" in _chosen(spec, argv)
    if ranks > gpus:
        yield Finding(
            id="L7",
            severity="warning",
            what=f"{ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}",
            fix=f"for a GPU job --nproc-per-node {gpus} (or gpu): the others would have no device",
        )
    elif ranks == 1 and gpus > 1 and not asked and spec.is_one_node:
        yield Finding(
            id="",
            severity="hint",
            what=f"one rank on a host with {gpus} GPUs",
            fix="--nproc-per-node gpu starts one on each",
        )
