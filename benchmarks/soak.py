"""Whether the watch keeps quiet: a sound job that does all that is legal between ranks, with ranks that are late by chance.

Rounds of plays (benchmarks/parts/legal.py, benchmarks/parts/legal_training.py) in random order, until the time is over: evaluation on rank 0, uneven
data under Join, a GAN with two optimizers, accumulation, subgroups, messages around a ring, checkpoints of rank 0, objects, collectives
waited for late, threads with a group of their own, compiled and sharded models, data workers, forks. Between any two of them ranks are
late: mostly by milliseconds, seldom by up to --longest seconds, asleep or at work. At the end they leave seconds apart.

Counted are alarms: whatever the watch says beyond that a rank keeps others waiting, and a report that is not "ok". Notes that a rank is
slow are facts and no alarms; they are shown by rule. The exit code is 1 if there is an alarm, or if the job does not end well.

    python benchmarks/soak.py [--minutes M] [--ranks N] [--longest SECONDS] [--seed N] [--only PLAY ...]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts import legal, legal_training
from parts.alarms import find_alarms
from parts.jobs import RANKWISE, describe_host, prepare, start_job

MINUTES, RANKS, LONGEST_S = 10.0, 4, 9.0
#: To start, and to end the last play, on a machine that is busy.
EXTRA_S = 300.0
PLAYS = {one.__name__: one for one in (*legal.PLAYS, *legal_training.PLAYS)}


def play(arguments: argparse.Namespace) -> None:
    """In a rank: play until rank 0 says that the time is over."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = legal.Stage(
        rank=rank,
        size=size,
        same=random.Random(arguments.seed),
        own=random.Random(f"{arguments.seed} {rank}"),
        halves=tuple(dist.new_group(list(range(first, size, 2))) for first in range(min(2, size))),
        aside=dist.new_group(),
        folder=arguments.in_rank,
        longest_s=arguments.longest,
    )
    counts, todo = Counter[str](), list[str]()
    end_s = time.monotonic() + arguments.minutes * 60
    while True:
        is_over = torch.tensor([float(time.monotonic() > end_s)])
        dist.broadcast(is_over, src=0)
        if is_over.item():
            break
        todo = todo or stage.same.sample(arguments.only, len(arguments.only))
        name = todo.pop()
        PLAYS[name](stage)
        counts[name] += 1
    dist.destroy_process_group()
    (arguments.in_rank / f"counts.{rank}").write_text(json.dumps(counts))
    time.sleep(stage.own.uniform(0, min(6.0, arguments.longest)))


def run(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Play in a job of its own, print what was played and noted, and return the alarms."""
    own = [
        "soak.py", "--minutes", arguments.minutes, "--longest", arguments.longest, "--seed", arguments.seed, "--in-rank", folder,
        "--only", *arguments.only,
    ]  # fmt: skip
    script = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nsys.argv = {list(map(str, own))}\nimport soak\nsoak.main()\n"
    flags = ["--nproc-per-node", str(arguments.ranks), "--report", str(folder / "report.json"), "--log-dir", str(folder / "logs")]  # fmt: skip
    with start_job(RANKWISE, flags, script) as job:
        is_over = job.wait_end(arguments.minutes * 60 + EXTRA_S) is not None
        code, errors = job.process.returncode if is_over else None, job.errors
    counts = _read_json(folder / "counts.0")
    print(f"{sum(counts.values())} plays: {', '.join(f'{name} {counts[name]}' for name in sorted(counts))}")
    lines = [line for path in folder.glob("logs/*/events.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["event"] == "hang.seen"]
    notes = [event for event in events if event["certainty"] != "proof"]
    print(f"{len(notes)} notes: {dict(Counter(event['rule'] for event in notes))}")
    for event in notes:
        print(f"  {event['rule']}, after {event['waited_s']:.0f} s: {event['message']}")
    alarms = find_alarms(events, _read_json(folder / "report.json"), code, errors)
    if alarms:
        print(errors, file=sys.stderr)
    return alarms


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    """Play, and print what was said.

    Raises:
        SystemExit: There was an alarm.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"how long it plays ({MINUTES:.0f})")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--longest", type=float, default=LONGEST_S, help=f"the longest delay in seconds ({LONGEST_S:.0f})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(PLAYS), choices=list(PLAYS), metavar="PLAY")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank:
        play(arguments)
        return
    prepare()
    print(describe_host())
    print(f"{arguments.ranks} ranks, {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        alarms = run(arguments, Path(folder))
    print(f"{len(alarms)} alarms" + "".join(f"\n  {alarm}" for alarm in alarms))
    if alarms:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
