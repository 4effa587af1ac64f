"""What a command gives to the ranks that it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.lint.finding import Found
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.shell.model import Launch, Setting
    from rankwise.lint.shell.study import Shell

_NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@rule("RW720", "error", "", "CUDA_VISIBLE_DEVICES hides the GPUs, or lists some that no rank uses", looks_at="shell")
def visible_devices(shell: Shell) -> Iterator[Found]:
    for setting in shell.reading.settings:
        devices = _devices(setting)
        twice = next((one for one in devices if devices.count(one) > 1), None)
        if setting.name in _NAMES and twice is not None:
            message = f"{setting.name}={setting.value.text} lists {twice} twice: CUDA then shows no GPU at all, and what falls back to the CPU trains there"
            yield Found(setting.span, message, "list each device once")
    has_numbers = any(launch.flag("nproc_per_node", "num_processes") for launch in shell.launches)
    for launch in shell.launches:
        listed = next((launch.command.env[name] for name in _NAMES if name in launch.command.env), None)
        devices, ranks = _devices(listed) if listed is not None else [], launch.num_per_node
        if listed is None or not launch.is_elastic or ranks is None or ranks >= len(devices):
            continue
        flag = launch.flag("nproc_per_node")
        # A rank may use several of them, but then all ranks use as many; a launch without a number may prepare the others.
        if len(devices) % ranks if flag else not has_numbers:
            why = f"{ranks} rank{'s' * (ranks > 1)} for {len(devices)} devices: the others are idle"
            yield Found(
                flag.word.span if flag else launch.word.span,
                why if flag else f"without --nproc-per-node one rank is started, and {len(devices)} devices are listed",
                f"{flag.spelled if flag else '--nproc-per-node'}={len(devices)}",
                severity="warning",
                also=[("the devices", shell.unit.path, listed.span)],
            )


def _devices(setting: Setting) -> list[str]:
    devices = [one.strip() for one in (setting.value.text or "").split(",")]
    return [] if "" in devices or devices[0].startswith("-") else devices


@rule("RW726", "error", "I1 I2 I10 I11 I12", "ranks that are started one by one do not form one job", looks_at="shell")
def ranks_started_by_hand(shell: Shell) -> Iterator[Found]:
    for group in _jobs(shell):
        if _number(group[0], "WORLD_SIZE") == 1:
            yield from _outside(group)
            continue
        yield from _outside(group)
        for check in (_twice, _too_few, _in_turn):
            yield from check(shell, group)


def _number(launch: Launch, name: str) -> int | None:
    setting = launch.command.env.get(name)
    text = (setting.value.text or "") if setting else ""
    return int(text) if text.isdecimal() else None


def _jobs(shell: Shell) -> list[list[Launch]]:
    """Ranks of one job each: one script, one WORLD_SIZE, and no `wait` between them."""
    jobs: list[list[Launch]] = []
    current: dict[object, list[Launch]] = {}
    by_command = {id(launch.command): launch for launch in shell.launches}
    for command in shell.reading.commands:
        if command.words[0].text == "wait":
            current = {}
        launch = by_command.get(id(command))
        if (
            launch is None
            or launch.launcher != "python"
            or _number(launch, "RANK") is None
            or _number(launch, "WORLD_SIZE") is None
        ):
            continue
        key = (launch.script.text if launch.script else None, _number(launch, "WORLD_SIZE"), command.arms)
        if key not in current:
            current[key] = []
            jobs.append(current[key])
        current[key].append(launch)
    return jobs


def _outside(group: list[Launch]) -> Iterator[Found]:
    for launch in group:
        rank, world = _number(launch, "RANK"), _number(launch, "WORLD_SIZE") or 0
        if rank is not None and rank >= world:
            message = f"RANK={rank} with WORLD_SIZE={world}: ranks are numbered from 0 to {world - 1}"
            yield Found(launch.command.env["RANK"].span, message, f"0 to {world - 1}", failure_class="I11")


def _twice(shell: Shell, group: list[Launch]) -> Iterator[Found]:
    seen: dict[int | None, Launch] = {}
    for launch in group:
        rank = _number(launch, "RANK")
        earlier = seen.setdefault(rank, launch)
        is_beside = earlier.command.is_background or launch.runs_elsewhere() or len(seen) > 1
        if earlier is not launch and is_beside:
            message = f"two processes of this job have RANK={rank}"
            also = [("the other one", shell.unit.path, earlier.command.span)]
            yield Found(
                launch.command.env["RANK"].span,
                message,
                "give each rank its own number",
                failure_class="I10",
                also=also,
            )


def _too_few(shell: Shell, group: list[Launch]) -> Iterator[Found]:
    world = _number(group[0], "WORLD_SIZE") or 0
    ranks = {_number(launch, "RANK") for launch in group}
    missing = sorted(set(range(world)) - {rank for rank in ranks if rank is not None})
    setting = group[0].command.env.get("MASTER_ADDR")
    is_here = setting is not None and is_loopback(setting.value.text or "unknown")
    if not missing or not is_here or not shell.is_script or any(launch.runs_elsewhere() for launch in group):
        return
    if any(launch.command.in_function or launch.command.in_open_loop for launch in group):
        return
    word = group[0].command.env["WORLD_SIZE"]
    names = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
    message = f"WORLD_SIZE={world} and {len(ranks)} rank{'s' * (len(ranks) > 1)} started: all wait for rank {names}"
    severity: Severity | None = "warning" if len(ranks) == 1 else None  # the others may have a script each
    fix = f"WORLD_SIZE={len(ranks)}, or start the others too"
    yield Found(word.span, message, fix, severity=severity)


def _in_turn(shell: Shell, group: list[Launch]) -> Iterator[Found]:
    if not shell.is_script or len(group) < 2 or any(launch.command.under for launch in group):
        return
    first = group[0]
    if not any(launch.command.is_background for launch in group[:-1]):
        message = f"rank {_number(first, 'RANK')} waits for the others, which are started only after it has ended"
        yield Found(first.command.span, message, "end the line with &, and `wait` after the last one; or use torchrun")


_SPELLINGS = {"--local_rank", "--local-rank"}


@rule("RW727", "error", "L1 R13", "--local_rank in a command gives all ranks the same number", looks_at="shell")
def local_rank_given(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.launcher == "python":
            continue
        for flag in launch.flags:
            if flag.spelled in _SPELLINGS and launch.is_elastic:
                message = (
                    f"{flag.spelled} before the script means --local-ranks-filter: it hides the output of other ranks"
                )
                yield Found(flag.word.span, message, "remove it: each rank reads LOCAL_RANK")
        yield from _behind(launch)


def _behind(launch: Launch) -> Iterator[Found]:
    for number, word in enumerate(launch.args):
        spelled, equals, value = word.head.partition("=")
        if spelled not in _SPELLINGS:
            continue
        then = launch.args[number + 1] if number + 1 < len(launch.args) else None
        names = word.names if equals else then.names if then else ()
        text = value if equals else (then.text or "") if then else ""
        if text.isdecimal() or "LOCAL_RANK" in names:
            shown = word.raw if equals else f"{spelled} {then.raw if then else ''}"
            message = f"every rank gets {shown}, so all have the same local rank"
            yield Found(word.span, message, "remove it, and read LOCAL_RANK from the environment in the script")
