"""What packages that run on clusters every day have taught the rules: where they must say nothing or less, and how near to that they must speak."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.registry import all_rules
from rankwise.lint.running.check import check_unit

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = "import os, time\nfrom typing import Any\nimport torch\nimport torch.distributed as dist\n"
_INIT = "dist.init_process_group('gloo')\n"

#: Rule, whether the text makes a process group, the text that is wrong, and one beside it of which it is not known, or that is legal.
_PAIRS = {
    "groups in a list": ("RW314", True, """
        rank, world = dist.get_rank(), dist.get_world_size()
        near = [dist.new_group([rank, (rank + shift) % world]) for shift in (2, 4)]
    """, """
        node_ranks = [list(range(i * 4, i * 4 + 4)) for i in range(dist.get_world_size() // 4)]
        groups = [dist.new_group(ranks=node_ranks[i]) for i in range(dist.get_world_size() // 4)]
    """),
    "a cache of groups": ("RW107", False, """
        def make(lists):
            for ranks in lists:
                if dist.get_rank() in ranks:
                    dist.new_group(ranks)
    """, """
        def make(ranks, group_cache):
            if dist.get_rank() in group_cache:
                return group_cache[ranks]
            return dist.new_group(ranks)
    """),
    "a parameter that has a class": ("RW308", False, """
        def ask(dist: Any):
            dist.broadcast(False, 0)
    """, """
        def ask(dist: "core.DistributedContext"):
            dist.broadcast(False, 0)
    """),
    "a parameter that is any rank": ("RW311", False, """
        def send(tensor):
            rank = dist.get_rank()
            dist.broadcast(tensor, rank)
    """, """
        def send(tensor, rank):
            dist.broadcast(tensor, rank)
    """),
    "each arm with a yield of its own": ("RW101", False, """
        def shared(path):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            yield path
    """, """
        def serve():
            while True:
                dist.gather_object(1, None)
        def shared(path):
            if dist.get_rank() != 0:
                serve()
                yield False
                return
            yield True
    """),
    "Ctrl-C reaches all": ("RW113", True, """
        try:
            torch.load("x.pt")
        except OSError:
            dist.barrier()
        dist.all_reduce(torch.ones(1))
    """, """
        try:
            time.sleep(9)
        except KeyboardInterrupt:
            dist.barrier()
        dist.all_reduce(torch.ones(1))
    """),
    "whoever makes the arguments chooses the device": ("RW202", False, """
        import transformers
        dist.init_process_group("nccl")
        args = transformers.HfArgumentParser(Words).parse_args_into_dataclasses()
        torch.ones(1).cuda()
    """, """
        import transformers
        dist.init_process_group("nccl")
        args = transformers.HfArgumentParser((Words, transformers.TrainingArguments)).parse_args_into_dataclasses()
        torch.ones(1).cuda()
    """),
    "spawned ranks are on one host": ("RW201", False, """
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
    """, """
        import torch.multiprocessing as mp
        def train(rank, world_size):
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
            torch.cuda.set_device(dist.get_rank())
        if __name__ == "__main__":
            mp.spawn(train, args=(4,), nprocs=4)
    """),
}  # fmt: skip


def _severities(rule: str, code: str, path: str = "train.py", project: Project | None = None) -> set[str]:
    unit = CodeUnit(path=path, language="python", code=code)
    found = check_unit(unit, project or Project(), all_rules(), None)
    return {one.severity for one in found if one.rule == rule}


@pytest.mark.parametrize("name", _PAIRS)
def test_the_wrong_one_is_an_error_and_its_neighbour_is_none(name: str) -> None:
    """Two texts that look alike, and only one of them surely breaks."""
    rule, makes_group, wrong, neighbour = _PAIRS[name]
    head = _HEAD + (_INIT if makes_group else "")
    assert "error" in _severities(rule, head + textwrap.dedent(wrong))
    assert "error" not in _severities(rule, head + textwrap.dedent(neighbour))


def test_what_a_helper_module_does_together_makes_its_program_distributed(tmp_path: Path) -> None:
    """The collectives are in comm.py, the mistake is in train.py, and the launcher's own start is seen nowhere."""
    (tmp_path / "comm.py").write_text(
        "import torch.distributed as dist\ndef mean(x):\n    dist.all_reduce(x)\n    return x / dist.get_world_size()\n"
    )
    code = "import time, os, torch\nfrom comm import mean\nrank = int(os.environ['RANK'])\nout = f'run-{time.time()}'\nos.makedirs(out, exist_ok=True)\ntorch.save(1, os.path.join(out, 'm.pt'))\nmean(torch.ones(1))\n"
    path = tmp_path / "train.py"
    path.write_text(code)
    assert _severities("RW517", code, str(path), Project(roots=(tmp_path,))) == {"error"}


def test_deepspeed_alone_is_enough_to_be_read() -> None:
    """A script whose only words of ranks are DeepSpeed's and Open MPI's is simulated as any other."""
    code = "import os, deepspeed\nengine = deepspeed.initialize(model=None)[0]\nif os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n    engine.save_16bit_model('out')\n"
    assert _severities("RW105", code) == {"error"}


@pytest.mark.parametrize("call", ["_init_api('pkg.graph')", "register(__name__)"])
def test_a_module_that_names_itself_may_get_names(call: str) -> None:
    """Bindings to C put functions into a module that names itself to them; another text that looks like a name is none."""
    code = "import torch\nfrom pkg._ffi import _init_api, register\ndef clear(graph):\n    _CAPI_Clear(graph)\n"
    assert _severities("RW804", code, "pkg/graph.py") == {"error"}
    assert _severities("RW804", f"{code}{call}\n", "pkg/graph.py") == set()
    assert _severities("RW804", f"{code}torch.save(1, 'model.pt')\n", "pkg/graph.py") == {"error"}


def test_a_rank_that_counts_nodes_is_no_gpu_under_spawn_either() -> None:
    """`node * gpus + number`: the second node has no such GPU; the number alone, on one node, is right."""
    code = _HEAD + textwrap.dedent("""
        import argparse
        import torch.multiprocessing as mp
        def train(number, args):
            rank = args.node_rank * 8 + number
            dist.init_process_group("nccl", rank=rank, world_size=16)
            torch.cuda.set_device(dist.get_rank())
        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--node_rank", type=int, default=0)
            mp.spawn(train, args=(parser.parse_args(),), nprocs=8)
    """)
    assert _severities("RW201", code) == {"error"}
    assert _severities("RW201", code.replace("args.node_rank * 8 + number", "number")) == set()


def test_a_choice_of_two_plain_samplers_splits_nothing() -> None:
    """Only `... else None` leaves open what the loader gets."""
    code = (
        _HEAD
        + _INIT
        + textwrap.dedent("""
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
        from torchvision.datasets import MNIST
        data = MNIST("data")
        model = DDP(torch.nn.Linear(2, 1))
        loader = DataLoader(data, sampler=RandomSampler(data) if os.environ.get("SHUFFLE") else SequentialSampler(data))
        for x, _ in loader:
            model(x).sum().backward()
    """)
    )
    assert _severities("RW504", code) == {"error"}
    assert _severities("RW504", code.replace("SequentialSampler(data))", "None)")) == set()
