"""How often a training state survives SIGKILL at a random moment of a save: it should be always, and the newest.

A child saves in a loop, a state whose every value is its step: in the foreground or in the background, as one rank or as
two, into a folder that earlier children have left behind. It tells its parent each step that ``save`` has called
committed. The parent kills it at a random moment, one rank first if there are two, and loads in a fresh state what
is there. That must be whole, all of one step, and no older than the last step that was told. Of half written folders a
child leaves no more than its own, as its first save clears away what was there before; at the end of a folder none is left.

Run it as `python benchmarks/kills.py [--kills N] [--folder DIR] [--seed N]`. It exits with 1 if one load was not as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from parts.jobs import describe_host

# By name, so that all is loaded before the first fork.
from rankwise.checkpoint import Keep, load, save, verify

if TYPE_CHECKING:
    from collections.abc import Callable

#: A folder is used for so many kills, then begun anew.
KILLS_OF_A_FOLDER = 25
#: The latest moment of a kill, from the start of the child: some saves long.
LATEST_S = 0.15
#: A dead save leaves a folder that was being written, or one that was being deleted.
MOST_LEFT = 2


@dataclass
class Way:
    """How a child saves."""

    num_ranks: int
    background: bool

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks}, {'background' if self.background else 'foreground'}"


def make_state(step: int) -> dict[str, Any]:
    """Make a state with its step in every value."""
    weights = {f"layer{num}": torch.full((16, 64 << num), float(step)) for num in range(4)}
    return {"weights": weights, "count": torch.tensor(step), "step": step}


def read_steps(state: dict[str, Any]) -> set[int]:
    """Return the steps that a state is of: a whole one is of one step."""
    tensors = [*state["weights"].values(), state["count"]]
    return {int(value) for tensor in tensors for value in tensor.unique()} | {state["step"]}


def fork(body: Callable[[], object]) -> int:
    """Run something in a forked process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def save_on(folder: Path, way: Way, rank: int, first: int, reported_fd: int, meeting: Path) -> None:
    """Save step after step until somebody kills us, and tell each that is committed."""
    if way.num_ranks > 1:
        store = dist.FileStore(str(meeting), way.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=way.num_ranks)
    for step in range(first, sys.maxsize):
        state = make_state(step)
        going = save(folder, state, step=step, keep=Keep(last=2), background=way.background)
        if way.background:
            for tensor in state["weights"].values():
                tensor.zero_()  # training goes on, and must not be seen in what is saved
        going.wait()
        if rank == 0:
            os.write(reported_fd, struct.pack("<q", step))


def kill_once(folder: Path, way: Way, first: int, chance: random.Random) -> tuple[int, str | None]:
    """Let a child save and kill it; return the last step that it told, and what else went wrong."""
    meeting = folder.with_name(f"{folder.name}.store-{chance.getrandbits(64):x}")
    read_fd, write_fd = os.pipe()
    pids = [
        fork(lambda rank=rank: save_on(folder, way, rank, first, write_fd, meeting)) for rank in range(way.num_ranks)
    ]
    os.close(write_fd)
    chance.shuffle(pids)
    time.sleep(chance.uniform(0, LATEST_S * way.num_ranks))
    for place, pid in enumerate(pids):
        if place and chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.01))  # the other goes on alone for a moment
        os.kill(pid, signal.SIGKILL)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    with os.fdopen(read_fd, "rb") as reported:
        data = reported.read()
    last = struct.unpack_from("<q", data, len(data) - 8)[0] if data else 0
    # The second of two may have noticed the death of the first, and raised.
    problem = "the child had ended by itself" if os.WIFEXITED(statuses[0]) else None
    return last, problem


def look(folder: Path, newest: int, *, has_saved: bool) -> tuple[int, str | None]:
    """Load what is there; return its step, and what is wrong with it."""
    state = make_state(0)
    try:
        step = load(folder, state)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we count
        return newest, f"load raised {type(error).__name__}: {error}"
    if step is None:
        return newest, None if newest == 0 else f"nothing is there, and step {newest} was committed"
    if read_steps(state) != {step}:
        return newest, f"step {step} holds values of the steps {sorted(read_steps(state))}"
    if step < newest:
        return newest, f"step {step} was loaded, and step {newest} was committed"
    left = list_leftovers(folder)
    if has_saved and len(left) > MOST_LEFT:
        return step, f"{len(left)} half written folders are there: {left}"
    return step, None


def list_leftovers(folder: Path) -> list[str]:
    """Name what is half written."""
    return sorted(path.name for path in folder.glob("*.tmp-*"))


def clear_up(folder: Path, step: int) -> str | None:
    """Save once more, undisturbed; return what is left over."""
    _, status = os.waitpid(fork(lambda: save(folder, make_state(step), step=step, keep=Keep(last=2))), 0)
    left = list_leftovers(folder)
    problems = verify(folder)
    if status or left or problems:
        return f"after one more save: exit {status}, leftovers {left}, damage {problems}"
    return None


def run(num_kills: int, base: Path, seed: int) -> list[str]:
    """Kill so many times; print how it went, and return what went wrong."""
    chance = random.Random(seed)
    problems: list[str] = []
    kills, with_leftovers = Counter[str](), 0
    newest, folder, num_saves = 0, base / "0", 0
    start = time.monotonic()
    for num in range(num_kills):
        if num % KILLS_OF_A_FOLDER == 0:
            newest, folder = 0, base / str(num)
        way = Way(2 if chance.random() < 0.2 else 1, chance.random() < 0.5)
        kills[str(way)] += 1
        last, problem = kill_once(folder, way, newest + 1, chance)
        with_leftovers += bool(list_leftovers(folder))
        num_saves += max(0, last - newest)
        newest, wrong = look(folder, max(newest, last), has_saved=last > 0)
        found = [text for text in (problem, wrong) if text]
        if num % KILLS_OF_A_FOLDER == KILLS_OF_A_FOLDER - 1 or num == num_kills - 1:
            found += [text for text in [clear_up(folder, newest + 1)] if text]
            shutil.rmtree(folder, ignore_errors=True)
        problems += [f"kill {num} ({way}, seed {seed}): {text}" for text in found]
    took_s = time.monotonic() - start
    print(
        f"kills: {num_kills}; loaded whole and newest: {num_kills - len({text.partition(' (')[0] for text in problems})}"
    )
    print(f"ways: {', '.join(f'{count} of {way}' for way, count in sorted(kills.items()))}")
    print(
        f"{num_saves} saves were told committed; {with_leftovers} kills left something half written; {num_kills / took_s:.1f} kills a second"
    )
    return problems


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save (default: the system's temporary folder)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what forks must have one thread
    print(describe_host())
    with tempfile.TemporaryDirectory(prefix="rankwise-kills-", dir=options.folder) as base:
        problems = run(options.kills, Path(base), options.seed)
    for text in problems:
        print(text)
    return 1 if problems else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
