"""Ranks that are started one by one do not form one job.

**Why it breaks.** Every rank blocks in `init_process_group` until WORLD_SIZE ranks, each with its own RANK, have joined
at one address and port. If one is missing, doubled, on another port, or started only after the previous one has ended,
all of them hang.

Bad:

```bash
export MASTER_ADDR=localhost MASTER_PORT=29617 WORLD_SIZE=2
RANK=0 python train.py
RANK=1 python train.py
```

Good:

```bash
export MASTER_ADDR=localhost MASTER_PORT=29617 WORLD_SIZE=2
RANK=0 python train.py &
RANK=1 python train.py &
wait
```

Bad:

```bash
export MASTER_ADDR=localhost MASTER_PORT=29617
for i in 0 1 2; do
    RANK=$i WORLD_SIZE=4 python train.py &
done
wait
```

Good:

```bash
export MASTER_ADDR=localhost MASTER_PORT=29617
for i in 0 1 2 3; do
    RANK=$i WORLD_SIZE=4 python train.py &
done
wait
```

**When it says nothing.** Ranks on several hosts, of which this script may start only some; lines on a page that are
meant for several terminals.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.lint.rule import Rule
from rankwise.lint.shell.slurm import tasks_of
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for group in _jobs(shell):
        if _number(group[0], "WORLD_SIZE") == 1:
            yield from _outside(shell, group)
            continue
        for check in (_outside, _twice, _meet_elsewhere, _too_few, _in_turn):
            yield from check(shell, group)
    yield from _worlds(shell)
    yield from _srun(shell)


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


def _worlds(shell: Shell) -> Iterator[Finding]:
    """Ranks that run side by side and use one port, but with different world sizes."""
    by_hand = [one for one in shell.launches if one.launcher == "python" and _number(one, "RANK") is not None]
    for first, second in itertools.pairwise(by_hand):
        one, other = (launch.command.env.get("WORLD_SIZE") for launch in (first, second))
        ports = [launch.command.env.get("MASTER_PORT") for launch in (first, second)]
        if one is None or other is None or not first.command.is_background or None in ports:
            continue
        known = one.value.text is not None and other.value.text is not None
        same = len({port.value.text for port in ports if port}) == 1 and _same_script(first, second)
        if known and same and one.value.text != other.value.text:
            message = f"ranks of this job have different WORLD_SIZEs: {one.value.text} and {other.value.text}"
            also = [("the other one", shell.piece.path, one.span)]
            yield shell.finding(
                RULE,
                other.span,
                message,
                "give all ranks the same WORLD_SIZE",
                failure_class="I12",
                also=also,
            )


def _same_script(first: Launch, second: Launch) -> bool:
    names = [launch.script.text if launch.script else None for launch in (first, second)]
    return names[0] is not None and names[0] == names[1]


def _outside(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    for launch in group:
        rank, world = _number(launch, "RANK"), _number(launch, "WORLD_SIZE") or 0
        if rank is not None and rank >= world:
            message = f"RANK={rank} with WORLD_SIZE={world}: ranks are numbered from 0 to {world - 1}"
            yield shell.finding(
                RULE, launch.command.env["RANK"].span, message, f"0 to {world - 1}", failure_class="I11"
            )


def _twice(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    seen: dict[int | None, Launch] = {}
    for launch in group:
        rank = _number(launch, "RANK")
        earlier = seen.setdefault(rank, launch)
        is_beside = earlier.command.is_background or launch.runs_elsewhere() or len(seen) > 1
        if earlier is not launch and is_beside:
            message = f"two processes of this job have RANK={rank}"
            also = [("the other one", shell.piece.path, earlier.command.span)]
            yield shell.finding(
                RULE,
                launch.command.env["RANK"].span,
                message,
                "give each rank its own number",
                failure_class="I10",
                also=also,
            )


def _meet_elsewhere(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    for name in ("MASTER_PORT", "MASTER_ADDR"):
        settings = [launch.command.env[name] for launch in group if name in launch.command.env]
        texts = [one.value.text for one in settings]
        thrown = [one for one in settings if one.is_prefix and one.value.is_random]
        known = {text for text in texts if text is not None}
        if len(group) > 1 and ((len(known) > 1 and None not in texts) or len(thrown) > 1):
            odd = next((one for one in settings if one.value.text != texts[0]), settings[-1])
            message = f"ranks of this job have different {name}s" + (
                f": {', '.join(sorted(known))}" if known else ""
            )
            yield shell.finding(
                RULE, odd.span, message, f"give all ranks the same {name}", failure_class="I2"
            )


def _too_few(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
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
    message = (
        f"WORLD_SIZE={world} and {len(ranks)} rank{'s' * (len(ranks) > 1)} started: all wait for rank {names}"
    )
    severity: Severity | None = "warning" if len(ranks) == 1 else None  # the others may have a script each
    fix = f"WORLD_SIZE={len(ranks)}, or start the others too"
    yield shell.finding(RULE, word.span, message, fix, severity=severity)


def _in_turn(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    if not shell.is_script or len(group) < 2 or any(launch.command.under for launch in group):
        return
    first = group[0]
    if not any(launch.command.is_background for launch in group[:-1]):
        message = (
            f"rank {_number(first, 'RANK')} waits for the others, which are started only after it has ended"
        )
        yield shell.finding(
            RULE,
            first.command.span,
            message,
            "end the line with &, and `wait` after the last one; or use torchrun",
        )


def _srun(shell: Shell) -> Iterator[Finding]:
    """WORLD_SIZE as a number, while srun starts a different number of tasks."""
    for launch in shell.launches:
        world, tasks = _number(launch, "WORLD_SIZE"), tasks_of(launch, shell.batch)
        if launch.launcher != "python" or world is None or tasks is None or tasks.tasks is None:
            continue
        if tasks.tasks != world and not launch.command.is_background and _number(launch, "RANK") is None:
            message = f"WORLD_SIZE={world}, but srun starts {tasks.tasks} task{'s' * (tasks.tasks > 1)}"
            yield shell.finding(
                RULE, launch.command.env["WORLD_SIZE"].span, message, "export WORLD_SIZE=$SLURM_NTASKS"
            )


RULE: Rule[Shell] = Rule(
    id="RW726",
    name="ranks-started-by-hand",
    severity="error",
    classes=("I1", "I2", "I10", "I11", "I12"),
    summary="ranks that are started one by one do not form one job",
    looks_at="shell",
    check=_check,
)
