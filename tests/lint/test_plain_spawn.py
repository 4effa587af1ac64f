"""Ranks that start ranks (RW220)."""

from __future__ import annotations

import pytest

from lint.plain_check import found

MP = "import torch.multiprocessing as mp\n"
GUARD = "if __name__ == '__main__':\n    "
BAD = {
    ("RW220", "reads its local rank"): MP
    + "import os, torch.distributed as dist\ndef f(i): dist.init_process_group('gloo')\n"
    + GUARD
    + "print(os.environ['LOCAL_RANK'])\n    mp.spawn(f, nprocs=2)",
}
LEGAL = {
    ("RW220", "one process"): MP + "import os\ndef f(i): pass\nr = os.environ['LOCAL_RANK']\nmp.spawn(f, nprocs=1)",
    ("RW220", "under a test"): MP
    + "import os\ndef f(i): pass\nr = os.environ['LOCAL_RANK']\nif args.spawn:\n    mp.spawn(f, nprocs=4)",
    ("RW220", "the ranks read it"): MP + "import os\ndef f(i): return os.environ['LOCAL_RANK']\nmp.spawn(f, nprocs=4)",
}


@pytest.mark.parametrize(("key", "code"), BAD.items(), ids=[" ".join(k) for k in BAD])
def test_a_start_that_fails_is_found(key: tuple[str, str], code: str) -> None:
    """A script that needs a launcher and starts ranks too gives a finding."""
    assert [f.failure_class for f in found(key[0], code)] == ["I24"]


@pytest.mark.parametrize(("key", "code"), LEGAL.items(), ids=[" ".join(k) for k in LEGAL])
def test_a_start_that_works_is_left_alone(key: tuple[str, str], code: str) -> None:
    """Legal ways give nothing."""
    assert found(key[0], code) == []
