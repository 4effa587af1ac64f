"""What happens to a checkpoint once its values are in host memory: shards, then the index, then the commit.

Every rank runs this, in a thread if the save is in the background. The ranks talk over the job's store and the folder
only, never by collectives, which belong to the training loop.
"""

from __future__ import annotations

import json
import platform
import zlib
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base import __version__
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CheckpointError
from rankwise.base.log import get_logger
from rankwise.base.rank_names import name_ranks
from rankwise.checkpoint.disk import Disk, put_in_words, remove_quietly, write_file
from rankwise.checkpoint.folder import commit, delete, list_checkpoints
from rankwise.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Chunk,
    File,
    Index,
    Manifest,
    TensorEntry,
    dump,
    dump_index,
    dump_manifest,
    parse,
)
from rankwise.checkpoint.retention import plan_removal
from rankwise.checkpoint.shard import write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch.distributed as dist

    from rankwise.checkpoint.ranks import Ranks
    from rankwise.checkpoint.retention import Keep
    from rankwise.checkpoint.shard import Box
    from rankwise.runtime.stop_vote import StopVote

#: Says something that is no error where people look.
warn = get_logger(__name__).warning

_POLL_S, _LONGEST_POLL_S = 0.002, 0.1
#: A file that another host has closed may take so long to be seen here: NFS asks the server again after some seconds.
_VISIBLE_S = 30.0
#: Rank 0 may serve the store: it stays until the others have read how the save ended, or so long.
_FAREWELL_S = 5.0
_BEAT_S = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that a rank needs to write its share.

    Attributes:
        ranks: Who saves.
        disk: What writes.
        temporary: The folder to write into, which is there.
        manifest: What the checkpoint will say of itself, without its files.
        boxes: What this rank writes, in the file's order.
        data: The bytes.
        trees: All that is not a tensor; on rank 0.
        rank_trees: What this rank has its own of.
        keep: What happens to older checkpoints.
        number: Of this save, among those of the job.
    """

    ranks: Ranks
    disk: Disk
    temporary: Path
    manifest: Manifest
    boxes: Sequence[Box]
    data: memoryview
    trees: Mapping[str, Any]
    rank_trees: Mapping[str, Any]
    keep: Keep | None
    number: int


def carry_out(order: Order) -> Path:
    """Write this rank's share, and wait until rank 0 has committed the whole.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: Some rank could not write; the same on every rank, and nothing is left behind.
    """
    try:
        part = _write_share(order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for us
        part = put_in_words(error, f"can't write into {order.temporary}")
    ranks = order.ranks
    if ranks.is_main:
        outcome = _finish(order, part)
        _tell(order, f"outcome/{ranks.rank}", outcome)
        _retire(order, outcome)  # which may take its time, and is nothing to the others
    else:
        _tell(order, f"part/{ranks.rank}", part)
    outcomes = _wait_words(order, [f"{order.number}/outcome/{rank}" for rank in ranks.mains])
    for outcome in outcomes:
        if "error" in outcome:
            raise CheckpointError(outcome["error"], rank=outcome["rank"], hint=outcome["hint"])
    return order.temporary.with_name(outcomes[ranks.mains.index(ranks.main)]["name"])


def agree_on_call(order: Order, vote: StopVote) -> None:
    """Settle with the other ranks at which call of ``check()`` all raise what went wrong.

    They know it at different moments: one that raised at once would be a step apart from the others, which would wait
        for it.
    """
    store, number = order.ranks.store, order.number
    try:
        store.set(f"{number}/call/{order.ranks.rank}", str(vote.answer()))
        words = _wait_words(order, [f"{number}/call/{rank}" for rank in range(order.ranks.world_size)])
        vote.settle(max(int(word) for word in words))
    except (CheckpointError, RuntimeError):
        return  # the store is gone or a rank is: the job ends anyway, and each rank raises by itself
    finally:
        vote.give_up()


def part_with_others(order: Order) -> None:
    """On rank 0, which may serve the store and be about to end, stay a little until the others know how the save ended."""
    store, number = order.ranks.store, order.number
    try:
        if order.ranks.rank:
            store.set(f"{number}/heard/{order.ranks.rank}", "")
            return
        heard = [f"{number}/heard/{rank}" for rank in range(1, order.ranks.world_size)]
        end = SYSTEM_CLOCK.monotonic() + _FAREWELL_S
        while not store.check(heard) and SYSTEM_CLOCK.monotonic() < end:
            SYSTEM_CLOCK.sleep(_LONGEST_POLL_S / 10)
    except RuntimeError:
        return  # the store is gone, and with it what was said


def forget(order: Order) -> None:
    """Take what was said in a save out of the store, once every rank is known to have read it: at the next save."""
    if order.ranks.rank:
        return
    for what in ("part", "outcome", "heard", "beat"):
        for rank in range(order.ranks.world_size):
            order.ranks.store.delete_key(f"{order.number}/{what}/{rank}")


# ------------------------------------------------------------ every rank


def _name_part(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _write_share(order: Order) -> dict[str, Any]:
    rank = order.ranks.rank
    part: dict[str, Any] = {"rank_trees": dict(order.rank_trees), "file": None, "chunks": []}
    if order.boxes:
        path = order.temporary / f"shard-{rank:05d}.safetensors"
        file, chunks = write_shard(order.disk, path, order.boxes, order.data)
        part["file"] = asdict(file)
        both = zip(order.boxes, chunks, strict=True)
        part["chunks"] = [[box.tensor, box.dtype, box.whole, chunk] for box, chunk in both]
    if order.ranks.is_main:
        return part
    # Through the folder and not the store: if rank 0 can't see it, neither could a resumed job.
    write_file(order.disk, order.temporary / _name_part(rank), [dump(part, indent=None)])
    return {}


# -------------------------------------------------- the first of the members


def _finish(order: Order, part: Mapping[str, Any]) -> dict[str, Any]:
    """Commit if all members have written, else clean up; return the outcome that all receive."""
    others, own = order.ranks.members[1:], order.ranks.rank
    try:
        answers = _wait_words(order, [f"{order.number}/part/{rank}" for rank in others])
    except CheckpointError as error:
        # Told like any other end: whoever is only slow must not wait for us as long again.
        remove_quietly(order.disk, order.temporary)
        text = error.message.replace("is not known to be saved", "was not saved")
        return {"error": text, "hint": error.hint, "rank": own}
    words: dict[int, Mapping[str, Any]] = {own: part, **dict(zip(others, answers, strict=True))}
    failed = {rank: word for rank, word in words.items() if "error" in word}
    try:
        if failed:
            rank, word = next(iter(failed.items()))
            more = f" (and {len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
            raise CheckpointError(word["error"] + more, rank=rank, hint=word.get("hint"))  # noqa: TRY301 - one way out
        parts = {rank: word if rank == own else _read_part(order, rank) for rank, word in words.items()}
        return {"name": _commit(order, parts).name}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for us
        remove_quietly(order.disk, order.temporary)
        what = f"step {order.manifest.step} was not saved"
        outcome = put_in_words(error, f"{what} in {order.temporary.parent}")
        if not isinstance(error, OSError):
            outcome["error"] = f"{what}: {outcome['error']}"
        return {**outcome, "rank": own if outcome["rank"] is None else outcome["rank"]}


def _read_part(order: Order, rank: int) -> dict[str, Any]:
    path = order.temporary / _name_part(rank)
    end, wait_s = SYSTEM_CLOCK.monotonic() + _VISIBLE_S, _POLL_S
    while True:
        try:
            part = parse(path.read_bytes(), path)
            if part["file"] is None:
                return part
            name, size = part["file"]["name"], part["file"]["size"]
            found = (order.temporary / name).stat().st_size
            if found == size:
                return part
            problem = f"rank {rank} wrote {size} bytes into {name}, and {found} of them are visible here"
        except FileNotFoundError as error:
            problem = f"rank {rank} wrote {error.filename}, but it is not visible on rank {order.ranks.rank}'s host"
        except CheckpointError as error:
            problem = error.message  # a network file system may show a file before all that is in it
        if SYSTEM_CLOCK.monotonic() > end:
            raise CheckpointError(
                problem,
                rank=order.ranks.rank,
                hint="all hosts must share the folder: pass a path on a network file system",
            )
        SYSTEM_CLOCK.sleep(wait_s)
        wait_s = min(1.0, 2 * wait_s)


def _commit(order: Order, parts: Mapping[int, Mapping[str, Any]]) -> Path:
    files: list[File] = []
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for part in parts.values():
        if part["file"] is not None:
            files.append(File(**part["file"]))
        for tensor, dtype, whole, (name, start, length, crc, offsets, shape) in part["chunks"]:
            entry = tensors.setdefault(tensor, (dtype, tuple(whole), []))
            entry[2].append(Chunk(name, start, length, crc, tuple(offsets), tuple(shape)))
    index = Index(
        {name: TensorEntry(dtype, whole, tuple(sorted(chunks, key=lambda chunk: chunk.offsets))) for name, (dtype, whole, chunks) in sorted(tensors.items())},
        order.trees,
        {rank: part["rank_trees"] for rank, part in parts.items() if part["rank_trees"]},
    )  # fmt: skip
    data = dump_index(index)
    size = write_file(order.disk, order.temporary / INDEX, [data])
    first = File(name=INDEX, size=size, head=size, crc32=zlib.crc32(data))
    versions = {"rankwise": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    now = datetime.fromtimestamp(SYSTEM_CLOCK.time(), tz=timezone.utc).isoformat(timespec="seconds")
    manifest = replace(order.manifest, files=(first, *files), versions=versions, saved_at=now)
    for rank in parts.keys() - {order.ranks.rank}:
        order.disk.remove(order.temporary / _name_part(rank))
    write_file(order.disk, order.temporary / MANIFEST, [dump_manifest(manifest)])
    return commit(order.disk, order.temporary, order.manifest.step)


def _retire(order: Order, outcome: Mapping[str, Any]) -> None:
    """Delete what need not be kept. The new checkpoint is safe, so that trouble here is no failure of it."""
    if "error" in outcome:
        return
    folder = order.temporary.parent
    try:
        found = {one.manifest.serial: one for one in list_checkpoints(folder) if one.manifest and not one.problem}
        for manifest in plan_removal([one.manifest for one in found.values() if one.manifest], order.keep):
            delete(order.disk, found[manifest.serial].path)
    except (OSError, CheckpointError) as error:
        warn(f"can't delete old checkpoints in {folder}: {getattr(error, 'strerror', None) or error}")


# ------------------------------------------------------------- the store


def _tell(order: Order, key: str, word: Mapping[str, Any]) -> None:
    try:
        order.ranks.store.set(f"{order.number}/{key}", json.dumps(word))
    except RuntimeError as error:
        raise _lost(order, error) from error


def _wait_words(order: Order, keys: Sequence[str]) -> list[Any]:
    """Wait for what others say. Short looks, not a wait: a wait would keep the store's connection to itself."""
    store, timeout_s, wait_s = order.ranks.store, order.ranks.timeout_s, _POLL_S
    try:
        end, beats = SYSTEM_CLOCK.monotonic() + timeout_s, _read_beats(order)
        while not store.check(list(keys)):
            if SYSTEM_CLOCK.monotonic() > end:
                before, beats = beats, _read_beats(order)
                if beats == before:
                    raise _tell_silence(order, [key for key in keys if not store.check([key])])
                end = SYSTEM_CLOCK.monotonic() + timeout_s  # slow, but at work
            SYSTEM_CLOCK.sleep(wait_s)
            wait_s = min(_LONGEST_POLL_S, 1.5 * wait_s)
        return [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise _lost(order, error) from error


def _read_beats(order: Order) -> list[bytes]:
    """Return what the ranks have told of their work: whoever is slow says another thing each time."""
    keys = [f"{order.number}/beat/{rank}" for rank in range(order.ranks.world_size)]
    return [order.ranks.store.get(key) for key in keys if order.ranks.store.check([key])]


def _tell_silence(order: Order, keys: Sequence[str]) -> CheckpointError:
    who = name_ranks([int(key.rpartition("/")[2]) for key in keys])
    return CheckpointError(
        f"step {order.manifest.step} is not known to be saved: for {order.ranks.timeout_s:.0f} s {who} did nothing, and had not reported a result",
        hint="look at that rank's host: its disk may hang",
    )


def report_work(disk: Disk, store: dist.Store, key: str) -> Disk:
    """Return a disk that tells the other ranks that it is at work, about once a second.

    Args:
        disk: What does the work.
        store: Where it is told.
        key: Under which name.
    """
    num_done, reported_s = 0, 0.0

    def reporting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal num_done, reported_s
            done = operation(*args)
            num_done += 1
            now_s = SYSTEM_CLOCK.monotonic()
            if now_s - reported_s > _BEAT_S:
                reported_s = now_s
                store.set(key, str(num_done))
            return done

        return run

    return Disk(*(reporting(getattr(disk, operation.name)) for operation in fields(Disk)))


def _lost(order: Order, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"step {order.manifest.step} was not saved, or is not known to be: the job's store is gone ({error})".partition(
            "\n"
        )[0],
        hint="the job is ending: a resume finds the latest complete checkpoint",
    )
