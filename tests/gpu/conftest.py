"""Tests that need a GPU of NVIDIA: without one each of them is skipped with the reason. `make test-gpu` runs them."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

import gpu_ranks


def pytest_configure(config: pytest.Config) -> None:
    """Register our marker."""
    config.addinivalue_line(
        "markers", "gpus(n): needs so many GPUs, also where the rest is tried on the CPU; without it one"
    )


@functools.cache
def find_gpus() -> tuple[int, str]:
    """Return how many GPUs torch can use here, and why there are none; no test runner holds memory of a GPU for that."""
    if not gpu_ranks.IS_CUDA:
        return 0, "tried on the CPU (RANKWISE_TEST_DEVICE), and there is nothing of it"
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0, "no GPU of NVIDIA here: /dev has no nvidia0"
    try:
        import torch
    except ImportError as error:
        return 0, f"torch can't be imported: {error}"
    if not torch.version.cuda:
        return 0, f"torch {torch.__version__} is built without CUDA"
    count = torch.cuda.device_count()
    return count, "" if count else f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this host can't show."""
    folder = os.path.join(Path(__file__).parent, "")  # noqa: PTH118 - compared with the paths of all tests
    for item in items:
        if not str(item.path).startswith(folder):
            continue
        marks = [mark.args[0] for mark in item.iter_markers("gpus")]
        needed = max(marks) if marks else int(gpu_ranks.IS_CUDA)
        count, why = find_gpus()
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=why or f"needs {needed} GPUs, and there is {count}"))
