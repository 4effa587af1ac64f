"""The nodes of a job and the place where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.shell.slurm import tasks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.shell.model import Flag, Launch
    from rankwise.lint.shell.study import Shell


@rule("RW709", "error", "I10 I11 L10", "the nodes of a job do not each have their own number", looks_at="shell")
def node_ranks(shell: Shell) -> Iterator[Found]:
    meeting = [
        launch
        for launch in shell.launches
        if launch.is_elastic and launch.is_static and (launch.num_nodes or 0) > 1 and not launch.is_partial
    ]
    for launch in meeting:
        yield from _alone(launch)
    for group in _jobs(meeting):
        yield from _doubled(shell, group)
        yield from _absent(shell, group)


def _alone(launch: Launch) -> Iterator[Found]:
    """One launch: whether it has a number, and a valid one."""
    nodes = launch.num_nodes or 0
    flag = launch.flag("node_rank")
    if flag is None:
        if "PET_NODE_RANK" in launch.command.env or not launch.flag("master_addr", "rdzv_endpoint"):
            return
        message = f"{nodes} nodes and no --node_rank: each one joins as node 0"
        fix = "--node_rank=$NODE_RANK with a different number on each node, or --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        yield Found(launch.word.span, message, fix)
        return
    text = launch.value("node_rank") or ""
    if text.isdecimal() and int(text) >= nodes and ":" not in (launch.value("nnodes") or ""):
        message = f"{flag.spelled} {text} with {nodes} nodes: they are numbered from 0 to {nodes - 1}"
        yield Found(flag.word.span, message, f"0 to {nodes - 1}", failure_class="I11")


def _jobs(launches: list[Launch]) -> list[list[Launch]]:
    """Launches that are nodes of one job: they differ only in their number."""
    groups: dict[object, list[Launch]] = {}
    for launch in launches:
        if (launch.value("node_rank") or "").isdecimal():
            texts = [
                (flag.name, flag.value.text if flag.value else "") for flag in launch.flags if flag.name != "node_rank"
            ]
            script = launch.script.text if launch.script else None
            key = (
                tuple(sorted((name, str(text)) for name, text in texts)),
                script,
                tuple(word.raw for word in launch.args),
            )
            groups.setdefault(key, []).append(launch)
    return [group for group in groups.values() if len(group) > 1]


def _doubled(shell: Shell, group: list[Launch]) -> Iterator[Found]:
    seen: dict[str, Launch] = {}
    for launch in group:
        rank = launch.value("node_rank") or ""
        earlier = seen.setdefault(rank, launch)
        flag = launch.flag("node_rank")
        if earlier is launch or flag is None or earlier.command.excludes(launch.command):
            continue
        if shell.is_script and not _is_beside(earlier) and not launch.runs_elsewhere():
            continue
        message = f"two nodes of this job have {flag.spelled} {rank}"
        also = [("the other one", shell.unit.path, earlier.word.span)]
        yield Found(flag.word.span, message, "give each node a number of its own, from 0", also=also)


def _is_beside(launch: Launch) -> bool:
    """Whether the next command starts while this one runs."""
    return launch.command.is_background or any(command.is_background for command in launch.command.under)


def _absent(shell: Shell, group: list[Launch]) -> Iterator[Found]:
    nodes = group[0].num_nodes or 0
    ranks = {int(launch.value("node_rank") or 0) for launch in group}
    missing = sorted(set(range(nodes)) - ranks)
    if not shell.is_script or len(ranks) < 2 or not missing or not all(_is_beside(one) for one in group[:-1]):
        return
    flag = group[-1].flag("nnodes")
    message = f"{nodes} nodes are given but {len(ranks)} are started: all wait for node {', '.join(map(str, missing))}"
    fix = f"--nnodes={len(ranks)}, or start node {missing[0]} too"
    yield Found(flag.word.span if flag else group[-1].word.span, message, fix, failure_class="L10")


@rule("RW710", "error", "I4 I21", "several nodes have no rendezvous address that all can reach", looks_at="shell")
def no_place_to_meet(shell: Shell) -> Iterator[Found]:
    here = [one for one in shell.launches if not one.runs_elsewhere() and (one.num_nodes or 0) > 1]
    is_rehearsal = any(one.command.is_background for one in here) and len(here) > 1
    for launch in shell.launches:
        if launch.launcher == "python":
            yield from _by_slurm(shell, launch)
        elif (launch.num_nodes or 0) > 1 and not launch.flag("standalone"):
            if is_rehearsal and not launch.runs_elsewhere():
                continue
            yield from _several(launch)


def _several(launch: Launch) -> Iterator[Found]:
    nodes = launch.num_nodes
    flag, host = _meeting(launch)
    if flag is None:
        if launch.is_elastic and not launch.is_partial and not _by_variable(launch):
            yield _nowhere(launch)
        return
    if host is None or not is_loopback(host):
        return
    is_first = launch.value("node_rank", "machine_rank") == "0"
    message = f"{nodes} nodes use {host} as the rendezvous, which is a different host on each"
    fix = f"{flag.spelled} with the address of node 0, the same on all nodes"
    yield Found(flag.word.span, message, fix, severity="warning" if is_first else None)


def _meeting(launch: Launch) -> tuple[Flag | None, str | None]:
    """The flag with the rendezvous, and the host in it."""
    if launch.launcher == "deepspeed":
        return None, None
    for name in ("rdzv_endpoint", "master_addr", "main_process_ip"):
        flag = launch.flag(name)
        if flag is None or (name == "master_addr" and not launch.is_static):
            continue
        text = launch.value(name)
        if name == "rdzv_endpoint" and flag.value is not None:
            head = flag.value.head
            return flag, head.rpartition(":")[0] or (text if text else None) if ":" in head else text
        return flag, text
    return None, None


def _by_variable(launch: Launch) -> bool:
    return any(name in launch.command.env for name in ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"))


def _nowhere(launch: Launch) -> Found:
    flag = launch.flag("nnodes")
    span = flag.word.span if flag else launch.word.span
    if launch.is_static:
        message = f"{launch.num_nodes} nodes and no --master_addr: each one waits on its own 127.0.0.1"
        if "MASTER_ADDR" in launch.command.env:
            message += f"; {launch.label} does not read MASTER_ADDR"
        return Found(span, message, "--master_addr=ADDRESS-OF-NODE-0, the same on all nodes")
    message = f"{launch.num_nodes} nodes and no --rdzv_endpoint: each one waits on itself"
    return Found(span, message, "--rdzv_endpoint=HOST:PORT, the same on all nodes", failure_class="I21")


def _by_slurm(shell: Shell, launch: Launch) -> Iterator[Found]:
    setting = launch.command.env.get("MASTER_ADDR")
    if setting is None or not is_loopback(setting.value.text or "unknown"):
        return
    tasks = tasks_of(launch, shell.batch)
    if tasks and tasks.nodes and tasks.nodes > 1:
        message = f"ranks on {tasks.nodes} nodes use {setting.value.text} as the rendezvous, which is a different host on each"
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield Found(setting.span, message, fix)


@rule("RW713", "error", "I27 I2", "each node draws its own random port, so they never connect", looks_at="shell")
def port_differs_between_nodes(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        flag = launch.flag("master_port", "rdzv_endpoint", "main_process_port")
        if flag is None or flag.value is None or not flag.value.is_random or not _is_on_several(launch):
            continue
        if shell.batch.is_batch or (launch.runs_elsewhere() and not _is_thrown_there(shell, launch)):
            continue
        message = f"{flag.value.raw} is a different number on each node, so the nodes use different ports"
        yield Found(flag.word.span, message, "choose one port for all nodes, such as 29617")


def _is_on_several(launch: Launch) -> bool:
    nodes = launch.num_nodes
    if nodes is not None:
        return nodes > 1
    rank = launch.flag("node_rank", "machine_rank")
    return rank is not None and launch.flag("nnodes", "num_machines") is not None


def _is_thrown_there(shell: Shell, launch: Launch) -> bool:
    """Whether a shell on the other host draws the number: ``ssh host 'torchrun … $RANDOM'``."""
    if not launch.command.under:
        return False
    command = launch.command.span
    inside = [
        one
        for one in shell.reading.references
        if one.name == "RANDOM" and command.line <= one.span.line <= command.end_line
    ]
    texts = [word.raw for word in launch.command.under[-1].words]
    return bool(inside) and any(text.startswith("'") or "\\$" in text for text in texts)


_USUAL = {"12355", "29500", "12345", "29400", "23456", "1234"}


@rule("RW714", "warning", "I9", "a single-host job uses a port that other jobs use too", looks_at="shell")
def port_of_every_tutorial(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        yield from _flag(launch)
    if not any(launch.is_elastic for launch in shell.launches) and (shell.batch.num_nodes or 1) == 1:
        yield from _settings(shell)


def _flag(launch: Launch) -> Iterator[Found]:
    flag = launch.flag("master_port", "main_process_port", "rdzv_endpoint")
    text = (flag.value.text or "") if flag and flag.value else ""
    host, _, port = text.rpartition(":")
    if flag is None or port not in _USUAL or launch.flag("standalone") or not _is_one_node(launch):
        return
    if flag.name == "rdzv_endpoint" and not is_loopback(host):
        return
    fix = f"{flag.spelled} with a port of your own"
    if launch.is_elastic:
        fix = "--standalone instead" if host else f"remove {flag.spelled}: torchrun chooses a free port"
    message = f"port {port} is a common default, which other jobs use too"
    yield Found(flag.word.span, message, fix)


def _is_one_node(launch: Launch) -> bool:
    if launch.is_elastic and launch.num_nodes != 1:
        return False
    return not launch.flag("num_machines", "machine_rank", "num_nodes", "hostfile", "node_rank", "master_addr")


def _settings(shell: Shell) -> Iterator[Found]:
    addresses = [one.value.text for one in shell.reading.settings if one.name == "MASTER_ADDR"]
    if any(text not in {"localhost", "127.0.0.1"} for text in addresses):
        return
    for setting in shell.reading.settings:
        if setting.name == "MASTER_PORT" and setting.value.text in _USUAL:
            message = f"port {setting.value.text} is a common default, which other jobs use too"
            yield Found(setting.span, message, "start it with torchrun, which chooses a free port, or use another")
