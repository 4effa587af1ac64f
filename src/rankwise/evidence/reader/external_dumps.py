"""Dumps of a job that ran without us, as a scene: files of torch's flight recorder, and of py-spy, one for each rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.errors import UsageError
from rankwise.base.files import read_regular
from rankwise.evidence.reader import flight_dump, pyspy
from rankwise.evidence.reader.scene import Evidence, RankFacts, Scene
from rankwise.evidence.reader.size_limits import check_world_size
from rankwise.evidence.reader.source_lines import with_sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.evidence.reader.flight_dump import FlightDump
    from rankwise.evidence.reader.pyspy import SpyDump

_ENDINGS = (".json", ".txt", ".log", ".pkl", ".pickle")
_PICKLE = b"\x80"
_STACKS_ONLY = "a stack shows where a rank was at one moment, not in which collective, nor for how long"
_MOST_NAMED = 5
_MOST_BYTES = 1 << 30


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalDumps:
    """What dumps tell.

    Attributes:
        scene: The ranks; its times are seconds since the epoch.
        notes: What the reader must know of it: files that were left out, ranks that have none.
    """

    scene: Scene
    notes: tuple[str, ...] = ()


@final
@dataclass(slots=True, kw_only=True)
class _Rank:
    flight: FlightDump | None = None
    spy: SpyDump | None = None
    written_s: float = 0.0

    @property
    def last_s(self) -> float | None:
        return self.flight.last_s if self.flight else None

    @property
    def dumped_s(self) -> float:
        """When its flight recorder was written: a file that was copied may seem younger, but none older than what is in it."""
        return max(self.written_s, self.last_s or 0.0)


def has_dumps(folder: Path) -> bool:
    """Tell whether there are dumps in a folder."""
    return any(_find_kind(_head(path)) for path in _list_files(folder))


def read(paths: Sequence[Path]) -> ExternalDumps:
    """Read dumps.

    Args:
        paths: Files, and folders of files; each file's name has its rank in it: ``nccl_trace_rank_3``, ``rank3.txt``.

    Raises:
        UsageError: One of them can't be read, or is no dump, or does not show its rank; or there is none.
    """
    ranks: dict[int, _Rank] = {}
    left_out: list[str] = []
    for path in paths:
        for file in _list_files(path) if path.is_dir() else [path]:
            kind = _find_kind(_head(file))
            if kind is None and path.is_dir():
                left_out.append(file.name)
                continue
            _add(ranks, file, kind)
    if not ranks:
        raise UsageError(
            "there are no dumps to read",
            hint="pass a folder of flight recorders or of py-spy dumps, one file per rank",
        )
    notes = [f"not read, as they are not dumps: {_name_some(left_out)}"] if left_out else []
    lines = [size for one in ranks.values() if one.flight and (size := one.flight.world_size)]
    try:
        world_size = check_world_size(max([*lines, max(ranks) + 1]))
    except ValueError as error:
        raise UsageError(f"these are not dumps of one job: {error}") from error
    if absent := [rank for rank in range(world_size) if rank not in ranks]:
        notes.append(
            f"no file of rank{'s' if len(absent) > 1 else ''} {_name_some(map(str, absent))}: a rank without one may have died, "
            "or hung elsewhere; look for it first"
        )
    scene = _to_scene(ranks, world_size)
    missing = dict.fromkeys(text for facts in scene.ranks if facts.evidence for text in facts.evidence.missing)
    return ExternalDumps(scene=_with_old_sources(scene), notes=(*notes, *(f"not known: {text}" for text in missing)))


def _add(ranks: dict[int, _Rank], file: Path, kind: str | None) -> None:
    number = _find_rank(file)
    one = ranks.setdefault(number, _Rank())
    if (kind == "flight" and one.flight) or (kind == "spy" and one.spy):
        raise UsageError(
            f"{file} is a second file of rank {number}",
            hint="pass the files of one moment only, one of each kind per rank",
        )
    try:
        data = read_regular(file, _MOST_BYTES)
        if kind == "spy":
            one.spy = pyspy.parse(data)
        else:
            one.flight = flight_dump.parse(data)
            one.written_s = file.stat().st_mtime
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(
            f"{file} is neither a flight recorder's nor py-spy's: {error}",
            hint="what torch writes to TORCH_NCCL_DEBUG_INFO_TEMP_FILE, or what `py-spy dump --pid N` prints",
        ) from error


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(8192)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error


def _find_kind(head: bytes) -> str | None:
    if pyspy.is_dump(head):
        return "spy"
    is_flight = head[:1] == _PICKLE or (head.lstrip()[:1] == b"{" and b'"comm_lib_version"' in head)
    # torch sorts no keys: where the first ones are not enough to tell, the version of the form does.
    is_flight = is_flight or (
        head.lstrip()[:1] == b"{" and re.search(rb'"(collective_seq_id|pg_config|pg_status)"', head) is not None
    )
    return "flight" if is_flight else None


def _find_rank(file: Path) -> int:
    name = file.name
    while name.endswith(_ENDINGS):
        name = name.rpartition(".")[0]
    found = re.findall(r"rank[_.-]?(\d+)", name, re.IGNORECASE) or re.findall(r"\d+", name)
    if not found:
        raise UsageError(f"{file} does not show its rank", hint="put it into the name, as in rank3.txt")
    return int(found[-1])


def _to_scene(ranks: dict[int, _Rank], world_size: int) -> Scene:
    backends: dict[str, set[str]] = {}
    for one in ranks.values():
        for name, found in (one.flight.backends if one.flight else {}).items():
            backends.setdefault(name, set()).update(found)
    mixed = {name for name, found in backends.items() if len(found) > 1}
    stacks = {rank: one.spy.stack if one.spy else None for rank, one in ranks.items()}
    joined = pyspy.have_joined(stacks)
    flights = [one for one in ranks.values() if one.flight]
    # Each rank wrote its file at a moment of its own. All stood still together only if none moved after another had
    # written.
    are_together = max((one.last_s or 0.0 for one in flights), default=0.0) < min(
        (one.dumped_s for one in flights), default=0.0
    )
    facts = []
    for rank, one in sorted(ranks.items()):
        if one.flight is not None:
            evidence = one.flight.to_evidence(world_size=world_size, mixed=mixed, dumped_s=one.dumped_s)
            still_s = one.dumped_s - one.last_s if are_together and one.last_s else 0.0
            if one.spy is not None:
                evidence = replace(evidence, missing=evidence.missing[1:])
        else:
            evidence, still_s = Evidence(has_joined=rank in joined, missing=(_STACKS_ONLY,)), 0.0
        facts.append(
            RankFacts(
                rank=rank,
                pid=one.spy.pid if one.spy else 0,
                evidence=replace(evidence, stacks={thread.name: thread.stack for thread in one.spy.threads})
                if one.spy
                else evidence,
                stack=one.spy.stack if one.spy else one.flight.guess_stack() if one.flight else None,
                still_s=still_s,
                cpu_share=0.0 if one.spy and one.spy.is_idle else None,
            )
        )
    now_s = max((one.dumped_s for one in ranks.values()), default=0.0)
    return Scene(ranks=tuple(facts), world_size=world_size, now_s=now_s, is_whole=len(facts) == world_size)


def _with_old_sources(scene: Scene) -> Scene:
    """Return the scene with the user's files that are here and have not been changed since: a line of today is not yesterday's."""
    found = with_sources(scene).sources
    return replace(
        scene,
        sources={
            path: text for path, text in found.items() if scene.now_s and Path(path).stat().st_mtime <= scene.now_s
        },
    )


def _name_some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
