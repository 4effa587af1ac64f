"""run_ranks: what a test sees of ranks that fail."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankwise
from rankwise.testing import run_ranks


def test_ranks_that_fail_alike_are_shown_once() -> None:
    """Of ranks whose errors and tracebacks are the same, one is shown for all, in the order in which they failed; those that lost a peer are alike whatever port they name."""

    def fail() -> None:
        rankwise.init()
        if dist.get_rank() in {2, 4}:
            raise ValueError("no such file")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(rankwise.RankFailedError, match="no such file") as caught:
        run_ranks(fail, 6)
    text = str(caught.value)
    assert text.startswith(("[rank 2] ranks 2, 4: no such file", "[rank 4] ranks 2, 4: no such file")), text
    assert text.count("Traceback") < 5, text
