"""The batch script of a job: what it asks Slurm for, and one launcher on each node by srun."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cluster.job import ALWAYS
from rankwise.cluster.launch_command import RendezvousPlace, ShellText, build_launch, join_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.cluster.job import JobSpec

_HEAD = """\
# All nodes meet at the first one, on a port that no other job has there.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + (SLURM_JOB_ID + $$) % 20000))
"""
_ENDED = """\
# Slurm ends this script itself only if the job is cancelled, out of time or has lost a node: it decides then what follows.
ended=
trap 'ended=yes' TERM
"""
_CODES = """\
# The launcher of a node that is lost is killed (137), and srun fails with it: how the job has ended is up to the others.
codes=$(mktemp --tmpdir="$PWD" .codes-XXXXXX)
"""
_NOTE = """bash -c 'trap : TERM USR1; "$@"; code=$?; echo "$code" >> "$0"; exit "$code"' "$codes" \\\n    """
_READ_CODES = """\
left=$(grep --invert-match --line-regexp 137 "$codes" | sort --numeric-sort | tail -n 1)
code=${left:-$code}
rm -f "$codes"
"""
#: How the parts of a job are named to scontrol: the id alone would name a whole array.
_TASK = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"


def build_script(spec: JobSpec) -> str:
    """Return the script."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(spec))]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in spec.variables.items()]
    blocks = [lines, [*spec.own.list("setup"), *exports], *_body(spec)]
    return "\n".join("\n".join(block).rstrip("\n") + "\n" for block in blocks if block)


def log_path(spec: JobSpec, native_id: str) -> Path:
    """Return where the job writes what all nodes print; for an array, a pattern."""
    return Path(spec.workdir) / f"{spec.name}-{native_id}{'_*' if spec.own.text('array') else ''}.out"


def is_apptainer(image: str) -> bool:
    """Tell whether an image is a file of Apptainer's (once Singularity): Pyxis runs all others."""
    return image.endswith(".sif")


def _options(spec: JobSpec) -> Iterator[str]:
    log = "%A_%a" if spec.own.text("array") else "%j"
    nodes = (
        f"{spec.min_nodes + spec.standby}-{spec.num_nodes}" if spec.min_nodes < spec.max_nodes else str(spec.num_nodes)
    )
    yield f"--job-name={shlex.quote(spec.name)}"
    yield f"--output={shlex.quote(f'{spec.workdir}/{spec.name}-'.replace('%', '%%') + f'{log}.out')} --open-mode=append"
    yield f"--chdir={shlex.quote(spec.workdir)}"
    # Without --ntasks-per-node: of a range of nodes, it would get the fewest.
    yield f"--nodes={nodes}"
    yield from ([f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else [])
    yield from ([f"--cpus-per-task={spec.cpus_per_node}"] if spec.cpus_per_node else [])
    yield from ([f"--mem={-(-spec.memory_bytes // 2**20)}M"] if spec.memory_bytes else [])
    if spec.time_s:
        minutes, seconds = divmod(spec.time_s, 60)
        yield f"--time={minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    notice_s = min(spec.grace_s, spec.time_s // 2) if spec.time_s else spec.grace_s
    yield f"--signal=USR1@{notice_s}"
    yield "--requeue" if spec.requeue else "--no-requeue"
    yield from (["--no-kill"] if spec.standby else [])
    for word in ("partition", "account", "qos", "constraint", "array"):
        if value := spec.own.text(word):
            yield f"--{word}={shlex.quote(value)}"
    yield from spec.own.list("options")


def _body(spec: JobSpec) -> Iterator[list[str]]:
    count = "SLURM_JOB_NUM_NODES"
    nodes = f"{spec.min_nodes}:$(({count} - {spec.standby}))" if spec.standby else f"${count}"
    place = None
    if spec.num_nodes > 1:
        place = RendezvousPlace(
            endpoint=ShellText("$head:$port"), run_id=ShellText("$SLURM_JOB_ID"), nodes=ShellText(nodes)
        )
        yield [_HEAD]
    launch = join_words(
        [*_container(spec), *build_launch(spec, place, python="python3" if spec.image else sys.executable)]
    )
    step = [
        f"srun {' '.join(_srun(spec))} \\\n    {_NOTE if spec.standby else ''}{launch}",
        "code=$?",
    ]
    yield [
        *([_ENDED.rstrip()] if spec.requeue else []),
        *([_CODES.rstrip(), *step, _READ_CODES.rstrip()] if spec.standby else step),
        *([_requeue(spec).rstrip()] if spec.requeue else []),
        'exit "$code"',
    ]


def _srun(spec: JobSpec) -> Iterator[str]:
    yield '--ntasks="$SLURM_JOB_NUM_NODES"'
    if spec.num_nodes > 1:
        yield "--label"
    # A launcher may use all cores of its node's share, and decides itself what the end of one means for the others.
    yield "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0"
    yield from (["--no-kill"] if spec.standby else [])
    if spec.image and not is_apptainer(spec.image):
        mounts = ",".join(f"{folder}:{folder}" for folder in _folders(spec))
        yield f"--container-image={shlex.quote(spec.image)} --container-mounts={shlex.quote(mounts)} --container-workdir={shlex.quote(spec.workdir)}"


def _container(spec: JobSpec) -> list[str]:
    if not spec.image or not is_apptainer(spec.image):
        return []
    binds = [word for folder in _folders(spec) for word in ("--bind", folder)]
    return [
        "apptainer",
        "exec",
        *(["--nv"] if spec.gpus_per_node else []),
        *binds,
        "--pwd",
        spec.workdir,
        spec.image,
    ]


def _folders(spec: JobSpec) -> list[str]:
    """Return what a container must see of the file system."""
    return list(dict.fromkeys((spec.workdir, str(Path(spec.workdir) / spec.checkpoint))))


def _requeue(spec: JobSpec) -> str:
    job = _TASK if spec.own.text("array") else "$SLURM_JOB_ID"
    limit = "" if spec.requeue == ALWAYS else f' && "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.requeue}'
    return (
        "# 75: the ranks have stopped in time, to be started again; 143: the notice came before they could listen to it.\n"
        f"if [[ ( $code == 75 || $code == 143 ) && -z $ended{limit} ]]; then\n"
        f'    scontrol requeue "{job}"\n'
        "fi\n"
    )
