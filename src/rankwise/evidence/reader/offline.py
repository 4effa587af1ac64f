"""Reads what ranks have left in folders when no launcher of ours looked on (``offline_setup.py``): while they live, and afterwards.

Ranks that live on this host are asked for their stacks, as `rankwise run` would; of all others the last copy counts, or the
file in memory, which outlives a killed rank. How a rank ended is told by its notes; of one that was killed there is no note.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from rankwise.base.errors import UsageError
from rankwise.evidence.reader import offline_layout, offline_live
from rankwise.evidence.reader.notes import Stack, parse_stack
from rankwise.evidence.reader.offline_file import (
    SILENT_S,
    fill,
    find_code,
    find_end,
    list_files,
    read_head,
    set_ends,
)
from rankwise.evidence.reader.scene import FRESH_S, Child, Evidence, RankFacts, Scene
from rankwise.evidence.reader.scene_file import shift
from rankwise.evidence.reader.size_limits import check_world_size
from rankwise.evidence.reader.source_lines import with_sources
from rankwise.evidence.reader.thread_choice import choose_stack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.offline_file import How, OfflineFile

#: A file that was written last so long before another rank began is of an earlier run in the same folder.
_EARLIER_S = 60.0
_SAME_CLOCK_S = 1e-3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRank:
    """One rank.

    Attributes:
        facts: What is known of it; of one that was ended from outside, as it was before.
        how: How it is, or ended.
        crash: Its stack when it crashed.
        file: What it has left.
    """

    facts: RankFacts
    how: How
    crash: Stack | None = None
    file: Path


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """A run, as far as its ranks have left anything.

    Attributes:
        folder: Of the run.
        ranks: Ascending.
        scene: All of them at one moment: now, if one lives here, or when the first was ended from outside.
        absent: Ranks of which there is nothing.
        notes: What the reader must know of it.
    """

    folder: Path
    ranks: tuple[OfflineRank, ...]
    scene: Scene
    absent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def has_any(paths: Sequence[Path]) -> bool:
    """Tell whether ranks have left anything in folders."""
    return all(path.is_dir() and list_files(path) for path in paths)


def read(paths: Sequence[Path], clock: Clock) -> OfflineRun:
    """Read what the ranks of a run have left: the newest run in these folders, and its last attempt.

    Args:
        paths: Folders of attempts, of runs, or of many runs; those of several hosts if each has its own.
        clock: Where the time comes from, for ranks that live.

    Raises:
        UsageError: There is nothing in them, or it can't be read.
    """
    found = [file for path in paths for file in map(read_head, list_files(path)) if file is not None]
    if not found:
        raise UsageError(f"ranks have left no evidence in {paths[0]}", hint="pass the folder that rank 0 named")
    files, notes = _choose(found)
    looks = offline_live.look({file.rank: file.head for file in files.values()}, clock)
    for file in files.values():
        file.live = looks.get(file.rank)
        fill(file)
    set_ends(files)
    try:
        world_size = check_world_size(max([int(file.head["world_size"]) for file in files.values()] + [max(files) + 1]))
    except ValueError as error:
        raise UsageError(f"{paths[0]} can't be read: {error}") from error
    absent = tuple(rank for rank in range(world_size) if rank not in files)
    scene, silent = _to_scene(files, world_size)
    ranks = tuple(
        OfflineRank(
            facts=facts,
            how=files[facts.rank].how,
            crash=parse_stack(files[facts.rank].crash),
            file=files[facts.rank].path,
        )
        for facts in scene.ranks
    )
    first = files[min(files)].path
    return OfflineRun(
        folder=first.parent.parent,
        ranks=ranks,
        scene=with_sources(scene),
        absent=absent,
        notes=(*notes, *silent),
    )


# --------------------------------------------------------------- which run


def _choose(found: list[OfflineFile]) -> tuple[dict[int, OfflineFile], list[str]]:
    """Return the files of the newest run's last attempt, by rank, and what was left out."""
    newest = max(found, key=lambda file: float(file.head["time_s"]))
    notes = []
    others = {str(file.head["run"]) for file in found} - {str(newest.head["run"])}
    if others:
        notes.append(
            f"this is the newest run, {newest.head['run']}; {len(others)} more beside it: pass the folder of the one you mean"
        )
    same = [file for file in found if file.head["run"] == newest.head["run"]]
    last = max(int(file.head["attempt"]) for file in same)
    if last:
        notes.append(f"this is attempt {last + 1}; earlier ones are beside it")
    size = newest.head["world_size"]  # of another size it was a run before this one, of the same name
    same = [file for file in same if int(file.head["attempt"]) == last and file.head["world_size"] == size]
    began_s = max(float(file.head["began_time_s"]) for file in same)
    files: dict[int, OfflineFile] = {}
    for file in sorted(same, key=lambda file: float(file.head["began_time_s"])):
        if float(file.head["time_s"]) >= began_s - _EARLIER_S or offline_layout.is_alive(file.head):
            files[file.rank] = file
    return files, notes


# ---------------------------------------------------------------- the scene


def _to_scene(files: Mapping[int, OfflineFile], world_size: int) -> tuple[Scene, list[str]]:
    """Return all ranks at one moment, and what is to be said of those that have fallen silent.

    Times are of the monotonic clock of the first rank's host; those of other hosts are brought to it by the clocks on
    the wall.
    """
    base_s = files[min(files)].offset_s
    ends = {rank: find_end(file) + file.offset_s - base_s for rank, file in files.items()}
    outside = [end for rank, end in ends.items() if files[rank].how in {"lives", "terminated", "unrecorded", "unknown"}]
    now_s = max(outside or ends.values())
    facts, notes = [], []
    for rank, file in sorted(files.items()):
        is_silent = (
            file.how == "unknown"
            and file.head.get("state") != "stopped"
            and now_s - ends[rank] > float(file.head["every_s"]) + SILENT_S
        )
        if is_silent:
            notes.append(
                f"rank {rank} on {file.head['host']} has written nothing for {now_s - ends[rank]:.0f} s, but others have: it was frozen or killed, or its host or its disk is gone"
            )
        one = _to_facts(file, now_s=now_s - file.offset_s + base_s, end_s=find_end(file), is_silent=is_silent)
        later_s = file.offset_s - base_s
        # Ranks of one host share its clock, and differ by when they wrote down what it said.
        facts.append(shift(one, later_s) if abs(later_s) > _SAME_CLOCK_S else one)
    return Scene(ranks=tuple(facts), world_size=world_size, now_s=now_s, is_whole=len(facts) == world_size), notes


def _to_facts(file: OfflineFile, *, now_s: float, end_s: float, is_silent: bool) -> RankFacts:
    """Return what is known of a rank, by the clock of its host."""
    has_ended = file.how in {"finished", "raised", "crashed", "vanished"}
    evidence = file.evidence or Evidence()
    if has_ended and not file.is_exact and file.evidence is not None and end_s > float(file.head["saved_s"]) + FRESH_S:
        # What it did between the last copy and its end is not known: that it did nothing must not be read from it.
        evidence = Evidence(
            groups=evidence.groups,
            has_joined=evidence.has_joined,
            has_come=evidence.has_come,
            has_left=evidence.has_left,
            missing=("its records end some time before it did",),
        )
    process = file.live.process if file.live is not None else RankFacts(
        rank=file.rank,
        pid=int(file.head["pid"]),
        state="ended" if has_ended else "stopped" if file.head.get("state") == "stopped" else "running",
        cpu_share=file.head.get("cpu_share"),
        children=tuple(Child(pid=pid, name=name, state=letter) for pid, name, letter in file.head.get("children", ())),
    )  # fmt: skip
    return replace(
        process,
        code=find_code(file) if has_ended else None,
        ended_s=end_s if has_ended else None,
        fault=file.notes.fault if file.how == "raised" else None,
        finished_s=file.notes.finished_s,
        left_at=file.notes.left_at,
        evidence=evidence,
        stack=None if has_ended else _find_stack(file, evidence, is_silent=is_silent),
        still_s=_find_still(file, now_s, end_s) if not has_ended else 0.0,
    )


def _find_still(file: OfflineFile, now_s: float, end_s: float) -> float:
    """Return for how long a rank has not moved, as far as is known."""
    if file.live is not None:
        return max(0.0, now_s - file.moved_s) if file.live.is_still else 0.0
    # One that stood still when it was copied stands there as long as it copies nothing else; of others it is not known.
    until_s = now_s if file.head.get("why") == "stall" or file.is_exact else end_s
    return max(0.0, until_s - file.moved_s)


def _find_stack(file: OfflineFile, evidence: Evidence, *, is_silent: bool) -> Stack | None:
    if is_silent:
        return None
    dumped = parse_stack(file.asked) if file.live is None else None
    is_fresh = evidence.stacks_s is not None and (
        evidence.stacks_s >= file.moved_s or (file.live is not None and evidence.stacks_s >= file.live.at_s - FRESH_S)
    )
    if is_fresh:  # one of before its last movement would accuse it of standing where it has left
        return choose_stack(evidence) or dumped or _nowhere(evidence)
    return dumped or _nowhere(evidence)


def _nowhere(evidence: Evidence) -> Stack | None:
    """Return a stack without frames for a rank that has not reached the others yet: that much is known of where it stands."""
    return None if evidence.has_come or evidence.has_joined else Stack()
