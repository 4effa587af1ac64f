"""Launchers in batch scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.slurm import tasks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.shell.model import Launch
    from rankwise.lint.shell.study import Shell


@rule("RW715", "error", "I24", "srun starts a launcher several times on a node", looks_at="shell")
def launcher_started_too_often(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.launcher != "python" and not launch.is_partial and not _is_sweep(launch):
            yield from _by_srun(shell, launch)


def _is_sweep(launch: Launch) -> bool:
    words = [
        *launch.args,
        *(flag.value for flag in launch.flags if flag.value and flag.name not in {"node_rank", "machine_rank"}),
    ]
    return any({"SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"} & set(word.names) for word in words)


def _by_srun(shell: Shell, launch: Launch) -> Iterator[Found]:
    tasks = tasks_of(launch, shell.batch)
    if tasks is None or tasks.tasks is None or tasks.tasks < 2:
        return
    if launch.num_nodes == tasks.tasks and launch.launcher != "deepspeed":
        return  # one launcher for each node that the job is said to have
    each = tasks.per_node
    also = [(tasks.where[0], shell.unit.path, tasks.where[1])] if tasks.where else []
    if each is not None and each > 1:
        message = f"srun starts {launch.label} {each} times on a node, and each one starts all ranks of the node"
        yield Found(launch.word.span, message, "srun --ntasks-per-node=1, or #SBATCH --ntasks-per-node=1", also=also)
    elif launch.num_nodes == 1 and launch.is_elastic:
        message = f"srun starts {launch.label} on {tasks.tasks} nodes, and each one is a separate job of one node"
        fix = f"--nnodes={tasks.tasks} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
        yield Found(launch.word.span, message, fix, also=also)


@rule("RW716", "error", "L10", "a launcher is started on fewer nodes than it waits for", looks_at="shell")
def nodes_not_started(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.is_elastic and not launch.is_partial and not launch.command.in_function:
            if not launch.flag("standalone"):
                yield from _first_only(shell, launch)
            yield from _other_number(shell, launch)


def _first_only(shell: Shell, launch: Launch) -> Iterator[Found]:
    nodes = shell.batch.num_nodes
    if nodes is None or nodes < 2 or launch.runs_elsewhere() or launch.command.under or _starts_itself(shell):
        return
    asked = launch.num_nodes
    also = [(f"#SBATCH --nodes={nodes}", shell.unit.path, shell.batch.spans["nodes"])]
    fix = f"srun --ntasks-per-node=1 {launch.label} …"
    if asked == 1:
        message = f"{launch.label} runs on the first of {nodes} nodes only; the others are idle"
        yield Found(launch.word.span, message, fix + f" --nnodes={nodes}", severity="warning", also=also)
    else:
        message = (
            f"a batch script runs on its first node only, so {launch.label} waits for nodes where nothing is started"
        )
        yield Found(launch.word.span, message, fix, also=also)


def _starts_itself(shell: Shell) -> bool:
    for command in shell.reading.commands:
        raws = [word.raw for word in command.words]
        if any(raw.startswith("srun") for raw in raws) and any("$0" in raw or "BASH_SOURCE" in raw for raw in raws):
            return True
    return False


def _other_number(shell: Shell, launch: Launch) -> Iterator[Found]:
    """One launcher runs on each node, but they wait for a different number of nodes."""
    flag, asked = launch.flag("nnodes"), launch.num_nodes
    tasks = tasks_of(launch, shell.batch)
    if flag is None or asked is None or tasks is None or tasks.tasks is None or tasks.per_node != 1:
        return
    if asked < 2 or tasks.tasks >= asked or ":" in (launch.value("nnodes") or "") or tasks.where is None:
        return
    beside = [other for other in shell.launches if other.is_elastic and other.word.span != launch.word.span]
    if launch.command.is_background or launch.command.under or any(one.num_nodes == asked for one in beside):
        return  # several steps may make up the job
    message = f"{asked} nodes are expected, but srun starts {launch.label} {tasks.tasks} time{'s' * (tasks.tasks > 1)}"
    also = [(tasks.where[0], shell.unit.path, tasks.where[1])]
    yield Found(flag.word.span, message, f"--nnodes={tasks.tasks}, or give srun {asked} tasks", also=also)


@rule("RW719", "warning", "R4", "torchrun undoes nohup: the job ends with the terminal", looks_at="shell")
def nohup_does_not_help(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        names = [base_name(word) for word in launch.wraps]
        if launch.launcher not in {"torchrun", "launch", "accelerate"} or "nohup" not in names or "setsid" in names:
            continue
        signals = launch.flag("signals_to_handle")
        if signals and "SIGHUP" not in (launch.value("signals_to_handle") or "SIGHUP"):
            continue
        word = launch.wraps[names.index("nohup")]
        message = f"{launch.label} handles SIGHUP itself, so the job ends with the terminal despite nohup"
        yield Found(word.span, message, f"setsid {launch.label} …, or start it in tmux")


_QUICK = {"echo", "date", "printf", "set", "cd", "true", "ls", "hostname", "export"}


@rule("RW729", "error", "R7", "a batch script ends while its job runs in the background", looks_at="shell")
def batch_script_ends_early(shell: Shell) -> Iterator[Found]:
    commands = shell.reading.commands
    if not shell.batch.is_batch or not shell.launches or shell.has_errors:
        return
    last = shell.launches[-1]
    outer = last.command.under[0] if last.command.under else last.command
    at = max(number for number, command in enumerate(commands) if command.span.line <= outer.span.end_line)
    after = [command for command in commands[at + 1 :] if (command.words[0].text or "") not in _QUICK]
    if outer.is_background and not outer.in_function and not after and outer.words[0].text not in {"cat", "tee"}:
        message = "the script ends while this runs in the background, and Slurm then kills it"
        yield Found(outer.span, message, "put `wait` at the end of the script")
