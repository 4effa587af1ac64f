"""Process group, ranks, devices, environment (RW201 to RW217): each mistake is found in other spellings too, legal code is left alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from lint.plain_check import rule_of
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding

HEAD = "import os\nimport torch\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n"

BAD = {
    ("RW201", "environment, through an attribute"): """
        class Job:
            def __init__(self):
                self.gpu = int(os.getenv("RANK"))
                self.net = torch.nn.Linear(2, 2).to(f"cuda:{self.gpu}")
        dist.init_process_group("nccl")
        Job()
    """,
    ("RW201", "modulo in a helper"): """
        def pick():
            return dist.get_rank() % torch.cuda.device_count()
        dist.init_process_group("nccl")
        torch.cuda.set_device(pick())
    """,
    ("RW201", "Slurm's number"): """
        me = int(os.environ["SLURM_PROCID"])
        x = torch.ones(1, device=torch.device("cuda", me))
    """,
    ("RW201", "device_ids"): """
        dist.init_process_group("nccl")
        r = dist.get_rank()
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(r), device_ids=[r])
    """,
    ("RW202", "spawned, plain cuda"): """
        def go(i, n):
            dist.init_process_group("nccl", "tcp://h:1", rank=i, world_size=n)
            x = torch.ones(1, device="cuda")
            dist.all_reduce(x)
        mp.spawn(go, args=(2,), nprocs=2)
    """,
    ("RW202", "literal index beside set_device"): """
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        x = torch.ones(1).to("cuda:0")
    """,
    ("RW202", "gloo"): 'dist.init_process_group("gloo")\ndist.barrier()\nx = torch.ones(1).cuda()',
    ("RW202", "barrier first"): """
        dist.init_process_group(backend="nccl")
        dist.barrier()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    """,
    ("RW203", "after a tensor"): """
        x = torch.zeros(1, device="cuda")
        os.environ.update(CUDA_VISIBLE_DEVICES="1")
    """,
    ("RW204", "number on the left"): 'if 0 == os.environ["LOCAL_RANK"]:\n    print()',
    ("RW204", "tuple"): 'me = os.getenv("RANK")\nif me in (0, -1):\n    print()',
    ("RW204", "not equal"): 'if os.environ.get("RANK", "0") != 0:\n    raise SystemExit',
    ("RW205", "kept for ever"): """
        FIRST = dist.get_rank() == 0 if dist.is_initialized() else True
        def main():
            dist.init_process_group("gloo")
            if FIRST:
                torch.save(1, "a.pt")
        main()
    """,
    ("RW205", "early return"): """
        def me():
            if not dist.is_initialized():
                return 0
            return dist.get_rank()
        if me() == 0:
            os.makedirs("out")
        dist.init_process_group("gloo")
    """,
    ("RW206", "store"): 'store = dist.FileStore("/shared/meet", 2)\ndist.init_process_group("gloo", store=store, rank=0, world_size=2)',
    ("RW206", "built of constants"): """
        where = os.path.join("/shared", "meet")
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=int(os.environ["RANK"]), world_size=2)
    """,
    ("RW207", "rank and size"): """
        os.environ["WORLD_SIZE"] = "2"
        os.environ["RANK"] = "1"
        gpu = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo")
    """,
    ("RW207", "fixed port of spawned ranks"): """
        def go(i):
            os.environ["MASTER_PORT"] = "29555"
            dist.init_process_group("gloo", rank=i, world_size=2)
        mp.spawn(go, nprocs=2)
    """,
    ("RW208", "socket in the worker"): """
        import socket
        def port():
            with socket.socket() as s:
                s.bind(("", 0))
                return s.getsockname()[1]
        def go(i):
            os.environ["MASTER_PORT"] = str(port())
            dist.init_process_group("gloo", rank=i, world_size=2)
        mp.spawn(go, nprocs=2)
    """,
    ("RW209", "constant"): """
        NUM_NODES = 2
        def go(i):
            dist.init_process_group("gloo", "tcp://127.0.0.1:2222", rank=i, world_size=NUM_NODES * 2)
        mp.spawn(go, nprocs=2)
    """,
    ("RW210", "environment against argument"): """
        os.environ["WORLD_SIZE"] = "4"
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    """,
    ("RW210", "more started than counted"): """
        def go(i):
            dist.init_process_group("gloo", "tcp://h:1", rank=i, world_size=2)
        mp.spawn(go, nprocs=4)
    """,
    ("RW210", "everybody is 0"): 'dist.init_process_group("gloo", rank=0, world_size=int(os.environ["WORLD_SIZE"]))',
    ("RW217", "default -1"): """
        import argparse
        p = argparse.ArgumentParser()
        p.add_argument("--local-rank", default=-1, type=int)
        a = p.parse_args()
        if a.local_rank != -1:
            dist.init_process_group("nccl")
    """,
    ("RW217", "argv"): 'import sys\nmine = [a for a in sys.argv if a.startswith("--local_rank=")]\ndist.init_process_group("gloo")',
    ("RW207", "fixed port, ranks by arguments"): """
        import sys
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    """,
    ("RW211", "two functions, one after training"): """
        def train():
            dist.init_process_group("gloo")
            for _ in range(9):
                dist.barrier()
        def evaluate():
            dist.init_process_group("gloo")
        train()
        evaluate()
    """,
    ("RW211", "in each turn"): """
        def fit(fold):
            dist.init_process_group("gloo")
            dist.barrier()
        for fold in range(5):
            fit(fold)
    """,
    ("RW211", "with each backend"): """
        for backend in ["gloo", "nccl"]:
            dist.init_process_group(backend)
    """,
    ("RW211", "twice in one spawned process"): """
        def work(rank):
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=rank, world_size=2)
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=rank, world_size=2)
        mp.spawn(work, nprocs=2)
    """,
    ("RW215", "seconds"): 'from datetime import timedelta as td\ndist.init_process_group("gloo", timeout=td(0, 5))',
    ("RW215", "days by position"): 'import datetime\nwait = datetime.timedelta(1800)\ndist.init_process_group("gloo", timeout=wait)',
    ("RW215", "too many seconds"): """
        from datetime import timedelta
        from accelerate import Accelerator, InitProcessGroupKwargs
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=3600 * 1000))])
    """,
}  # fmt: skip

LEGAL = {
    ("RW215", "two hours, seconds by position, days by name"): """
        from datetime import timedelta
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
        dist.init_process_group("gloo", timeout=timedelta(0, 7200))
        dist.init_process_group("gloo", timeout=timedelta(days=30))
    """,
    ("RW215", "perhaps short"): """
        from datetime import timedelta
        long = os.environ.get("LONG")
        dist.init_process_group("gloo", timeout=timedelta(minutes=9) if long else timedelta(seconds=5))
        dist.init_process_group("gloo", timeout=timedelta(seconds=5) * 60)
        dist.init_process_group("gloo", timeout=timedelta(seconds=int(long)))
    """,
    ("RW215", "in a test, with a store of its own, or for another group"): """
        from datetime import timedelta
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=1))
        def test_it():
            dist.init_process_group("gloo", timeout=timedelta(seconds=5))
            dist.new_group(timeout=timedelta(seconds=5))
    """,
    ("RW211", "destroyed between"): """
        def cleanup():
            dist.destroy_process_group()
        for _ in range(2):
            dist.init_process_group("gloo")
            dist.destroy_process_group()
        for backend in ["gloo", "nccl", "mpi"]:
            dist.init_process_group(backend)
            cleanup()
        dist.init_process_group("gloo")
    """,
    ("RW211", "one of two"): """
        def start(fast):
            if fast:
                dist.init_process_group("nccl")
                return
            dist.init_process_group("gloo")
        start(os.environ.get("FAST"))
    """,
    ("RW211", "where the first one has failed"): """
        try:
            dist.init_process_group("nccl")
        except RuntimeError:
            dist.init_process_group("gloo")
    """,
    ("RW211", "tried again"): """
        for _ in range(3):
            try:
                dist.init_process_group("gloo")
                break
            except RuntimeError:
                pass
    """,
    ("RW211", "new processes each time"): """
        from accelerate import notebook_launcher
        def work(rank, *args):
            dist.init_process_group("gloo", "tcp://localhost:1234", rank=rank, world_size=2)
        def cell():
            dist.init_process_group("gloo")
        for n in (1, 2):
            mp.spawn(work, nprocs=n)
            notebook_launcher(cell, num_processes=n)
            for rank in range(n):
                mp.Process(target=work, args=(rank, n)).start()
        mp.spawn(work, nprocs=2)
        notebook_launcher(cell, num_processes=2)
    """,
    ("RW211", "remembered"): """
        import functools
        @functools.cache
        def once():
            dist.init_process_group("gloo")
        class Group:
            is_made = False
            def start(self):
                if self.is_made:
                    return
                dist.init_process_group("gloo")
                self.is_made = True
        for _ in range(5):
            once()
        group = Group()
        for _ in range(5):
            group.start()
    """,
    ("RW211", "one turn"): """
        rounds = 1
        for _ in range(rounds):
            dist.init_process_group("gloo")
        dist.destroy_process_group()
        for backend in ["gloo"]:
            dist.init_process_group(backend)
    """,
    ("RW211", "until it is there"): """
        while not dist.is_initialized():
            dist.init_process_group("gloo")
    """,
    ("RW211", "the group's end is elsewhere"): """
        from helpers import leave
        for _ in range(5):
            dist.init_process_group("gloo")
            leave()
    """,
    ("RW201", "spawn's argument"): """
        def go(rank, n):
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", "tcp://h:1", rank=rank, world_size=n)
        mp.spawn(go, args=(2,), nprocs=2)
    """,
    ("RW201", "rank as a number of something else"): """
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        x = torch.full((1,), dist.get_rank(), device="cpu")
    """,
    ("RW201", "less the node's share"): """
        r = int(os.environ["RANK"]) - int(os.environ["GROUP_RANK"]) * int(os.environ["LOCAL_WORLD_SIZE"])
        torch.cuda.set_device(r)
    """,
    ("RW201", "parameter of a function that others call"): "def use(rank):\n    torch.cuda.set_device(rank)",
    ("RW201", "modulo of the local world"): 'torch.cuda.set_device(int(os.environ["RANK"]) % int(os.environ["LOCAL_WORLD_SIZE"]))',
    ("RW202", "device_id"): """
        d = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=d)
        dist.barrier()
        x = torch.ones(1, device="cuda")
    """,
    ("RW203", "before"): 'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\nx = torch.zeros(1, device="cuda")',
    ("RW203", "asked whether there is CUDA"): 'ok = torch.cuda.is_available()\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"',
    ("RW204", "text"): 'if os.environ["RANK"] == "0":\n    print()',
    ("RW204", "is it there"): 'if os.environ.get("RANK") is None or not os.environ.get("LOCAL_RANK"):\n    print()',
    ("RW205", "makes it itself"): """
        def ready():
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            return dist.get_rank()
        ready()
    """,
    ("RW205", "parent of spawned ranks"): """
        def me():
            return dist.get_rank() if dist.is_initialized() else 0
        def go(i):
            dist.init_process_group("gloo", "tcp://h:1", rank=i, world_size=2)
            print(me())
        print(me())
        mp.spawn(go, nprocs=2)
    """,
    ("RW206", "job's id"): """
        dist.init_process_group("gloo", init_method="file:///s/" + os.environ["SLURM_JOB_ID"], rank=0, world_size=2)
    """,
    ("RW206", "parameter"): 'def go(path):\n    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)',
    ("RW207", "setdefault"): 'os.environ.setdefault("MASTER_PORT", "1")\nr = os.environ["RANK"]\ndist.init_process_group("gloo")',
    ("RW207", "no port"): """
        dist.init_process_group("gloo", init_method="tcp://localhost", rank=int(os.environ["RANK"]), world_size=2)
    """,
    ("RW207", "only if absent"): """
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = "29500"
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    """,
    ("RW207", "alone"): """
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
        dist.init_process_group("gloo")
    """,
    ("RW208", "parent hands it on"): """
        import random
        def go(i, port):
            dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=i, world_size=2)
        mp.spawn(go, args=(random.randint(1024, 2048),), nprocs=2)
    """,
    ("RW209", "one node"): 'os.environ["MASTER_ADDR"] = "localhost"\ndist.init_process_group("gloo")',
    ("RW210", "both from the launcher"): """
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    """,
    ("RW217", "environment wins"): """
        import argparse
        p = argparse.ArgumentParser()
        p.add_argument("--local_rank", type=int, default=0)
        a = p.parse_args()
        a.local_rank = int(os.environ.get("LOCAL_RANK", a.local_rank))
        torch.cuda.set_device(a.local_rank)
        dist.init_process_group("nccl")
    """,
    ("RW207", "number as text"): 'rank = 3\nos.environ["RANK"] = str(rank)\ndist.init_process_group("gloo")',
    ("RW207", "address by arguments"): """
        import sys
        dist.init_process_group("gloo", init_method=sys.argv[3], rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
    """,
    ("RW207", "one process"): 'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=0, world_size=1)',
}  # fmt: skip


def found(rule_id: str, code: str) -> list[Finding]:
    """What a rule finds in a program."""
    text = HEAD + textwrap.dedent(code)
    script = study(CodeUnit(path="train.py", language="python", code=text), Project())
    return list(rule_of(rule_id).check(script))


def by_key(key: tuple[str, str]) -> str:
    return ": ".join(key)


@pytest.mark.parametrize("key", BAD, ids=by_key)
def test_mistake_is_found_once_or_more(key: tuple[str, str]) -> None:
    """Each mistake is found, in one line of words, at a place of the text."""
    findings = found(key[0], BAD[key])
    assert findings
    for one in findings:
        assert "\n" not in one.message + one.fix
        assert one.span.line > HEAD.count("\n")
        assert one.failure_class in rule_of(key[0]).classes


@pytest.mark.parametrize("key", LEGAL, ids=by_key)
def test_legal_code_is_left_alone(key: tuple[str, str]) -> None:
    """What looks like the mistake and is none gives no finding."""
    assert found(key[0], LEGAL[key]) == []


def test_bare_rank_breaks_and_modulo_only_sometimes() -> None:
    """The global rank as a device is an error; folded onto the node it is a warning."""
    code = 'dist.init_process_group("nccl")\ntorch.cuda.set_device(dist.get_rank(){})'
    assert [one.severity for one in found("RW201", code.format(""))] == ["error"]
    assert [one.severity for one in found("RW201", code.format(" % 8"))] == ["warning"]


def test_message_uses_the_users_names() -> None:
    """The words of a finding are those of the script."""
    (one,) = found("RW201", 'my_rank = int(os.environ["RANK"])\ntorch.cuda.set_device(my_rank)')
    assert "`my_rank`" in one.message
    assert "LOCAL_RANK" in one.fix
