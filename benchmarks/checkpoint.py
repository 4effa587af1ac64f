"""What a checkpoint costs: the time that training stands still, and the time until all of it is on the disk.

One process saves a state of 400 MB, 100 tensors of 4 MB, with torch.save, torch.distributed.checkpoint's save and
async_save, Lightning's two ways (TorchCheckpointIO, which its Trainer uses, and AsyncCheckpointIO), and rankwise in the
foreground and in the background. Two measures of the machine stand beside them in the same run: a copy of the same bytes
in memory (memcpy, into memory that is there), and a plain write of them into one file, with fsync.

stall: seconds until the call returns. total: seconds until the save is done as its maker sees it. Only rankwise and the
raw write have reached the disk by then: the others leave that to the system, so for each of them the seconds that
fsync of its files takes afterwards are added as "+ fsync"; before each save the system's buffers are written out.

All take turns, round by round; each number is the median of the rounds, with the smallest and the largest in brackets.
Run it as `python benchmarks/checkpoint.py [--rounds N] [--megabytes M] [--folder F]`; the machine should be idle.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

import rankwise
from rankwise import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Saves a state below a folder; returns what waits for its end, or None if it has ended.
    Save = Callable[[dict[str, torch.Tensor], Path], Callable[[], object] | None]

TENSOR_BYTES = 4_000_000


def copy_in_memory(size: int) -> float:
    """Return the seconds that a copy of so many bytes takes."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def write_raw(data: memoryview, folder: Path) -> float:
    """Return the seconds that a plain write with fsync takes."""
    start = time.perf_counter()
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    at = 0
    while at < len(data):
        at += os.write(fd, data[at : at + (16 << 20)])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def sync_files(folder: Path) -> float:
    """Return the seconds until all files of a folder are on the disk."""
    start = time.perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    return time.perf_counter() - start


def find_ways() -> dict[str, Save]:
    """Return the ways to save, by name; Lightning's only where it is installed."""

    def with_torch(state: dict[str, torch.Tensor], folder: Path) -> None:
        torch.save(state, folder / "state.pt")

    def with_dcp(state: dict[str, torch.Tensor], folder: Path) -> None:
        dcp.save({"model": state}, checkpoint_id=folder / "dcp")

    def with_dcp_async(state: dict[str, torch.Tensor], folder: Path) -> Callable[[], object]:
        future = dcp.async_save({"model": state}, checkpoint_id=folder / "dcp")
        return getattr(future, "upload_completion", future).result

    def with_ours(state: dict[str, torch.Tensor], folder: Path) -> None:
        checkpoint.save(folder.parent / "ours", {"model": state}, step=0)

    def with_ours_in_background(state: dict[str, torch.Tensor], folder: Path) -> Callable[[], object]:
        return checkpoint.save(folder.parent / "ours", {"model": state}, step=0, background=True).wait

    ways: dict[str, Save] = {"torch.save": with_torch, "dcp.save": with_dcp, "dcp.async_save": with_dcp_async}
    with contextlib.suppress(ImportError):
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: PLC0415

        background = AsyncCheckpointIO(TorchCheckpointIO())

        def with_lightning(state: dict[str, torch.Tensor], folder: Path) -> None:
            TorchCheckpointIO().save_checkpoint({"model": state}, folder / "state.ckpt")

        def with_lightning_async(state: dict[str, torch.Tensor], folder: Path) -> Callable[[], object]:
            path = folder / "state.ckpt"
            background.save_checkpoint({"model": state}, path)

            def wait() -> None:
                # It has one thread and hands out no future: what is queued behind the save ends after it.
                background._executor.submit(lambda: None).result()  # type: ignore[union-attr]

            return wait

        ways |= {"Lightning": with_lightning, "Lightning async": with_lightning_async}
    return {**ways, "rankwise": with_ours, "rankwise background": with_ours_in_background}


def measure(rounds: int, size: int, folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return stall, total and the seconds of fsync afterwards, for each way and round."""
    state = {f"layer{number}": torch.rand(TENSOR_BYTES // 4) for number in range(size // TENSOR_BYTES)}
    data = memoryview(bytearray(os.urandom(1 << 20)) * (size >> 20))
    found: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(rounds + 1):  # the first round is for memory and connections that are new
        for name, save in find_ways().items():
            own = folder / f"{number}-{name.replace(' ', '-')}"
            own.mkdir()
            os.sync()
            start = time.perf_counter()
            wait = save(state, own)
            stall_s = time.perf_counter() - start
            if wait is not None:
                wait()
            total_s = time.perf_counter() - start
            later_s = 0.0 if name.startswith("rankwise") else sync_files(own)
            if number:
                found.setdefault(name, []).append((stall_s, total_s, later_s))
            shutil.rmtree(own)
            shutil.rmtree(folder / "ours" / "step-0", ignore_errors=True)
        raw = folder / f"{number}-raw"
        raw.mkdir()
        os.sync()
        copy_s, raw_s = copy_in_memory(size), write_raw(data, raw)
        if number:
            found.setdefault("memcpy", []).append((copy_s, copy_s, 0.0))
            found.setdefault("raw write", []).append((raw_s, raw_s, 0.0))
        shutil.rmtree(raw)
    return found


def show(found: dict[str, list[tuple[float, float, float]]]) -> None:
    """Print the table, and the two ratios that are claimed."""

    def middle(name: str, column: int) -> float:
        return statistics.median(row[column] for row in found[name])

    print(f"{'':22}{'stall, ms':>24}{'total, ms':>26}{'+ fsync, ms':>13}")
    for name, rows in found.items():
        cells = []
        for column in (0, 1):
            values = sorted(row[column] for row in rows)
            cells.append(f"{1000 * statistics.median(values):7.0f} [{1000 * values[0]:6.0f},{1000 * values[-1]:6.0f}]")
        print(f"{name:22}{cells[0]:>24}{cells[1]:>26}{1000 * middle(name, 2):13.0f}")
    for name in ("rankwise background", "dcp.async_save"):
        print(f"{name}: stall / memcpy = {middle(name, 0) / middle('memcpy', 0):.2f}")
    for name in ("rankwise", "rankwise background"):
        pairs = sorted(row[1] / raw[1] for row, raw in zip(found[name], found["raw write"], strict=True))
        print(f"{name}: total / raw write = {middle(name, 1) / middle('raw write', 1):.2f} (by round: {pairs[0]:.2f} to {pairs[-1]:.2f})")  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="where to save; default: the system's temporary folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="rankwise-benchmark-", dir=options.folder))
    try:
        with rankwise.init():
            show(measure(options.rounds, options.megabytes * 1_000_000, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
