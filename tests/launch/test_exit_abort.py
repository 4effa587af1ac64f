"""A job that has done its work is a success: neither torch's abort at exit (pytorch#190489) nor its deadlock there fails it."""

from __future__ import annotations

import json
import os
import textwrap
from typing import TYPE_CHECKING

import pytest

from support import run_rankwise, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
#: How often the racy scripts run; under torchrun about half of such jobs fail.
RUNS = int(os.environ.get("RANKWISE_ABORT_RUNS", "3"))

DDP = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad(); model(torch.randn(8, 64)).sum().backward(); optimizer.step()
"""
REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(5): dist.all_reduce(torch.ones(1000))
"""
# One core, and the group's thread has the lowest priority: it has still to drop the last work when the model goes,
# and wants the interpreter's lock for it, in whose hand the model's Reducer waits for the thread.
DEADLOCK = """
    import os, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def main():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        INIT
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model(torch.ones(2, 4)).sum().backward()
        for task in map(int, os.listdir("/proc/self/task")):
            if task != os.getpid():
                os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
        dist.all_reduce(torch.ones(3))
        DESTROY

    main()
"""
# Aborts where torch does: after the script, atexit and all, while the interpreter goes down.
ABORT = """
    import os, sys
    print("work done", flush=True)
    class Thread:
        def __del__(self, write=os.write, abort=os.abort):
            write(2, TEXT); abort()
    sys.modules["__held__"] = Thread()
"""
LINE = 'b"terminate called without an active exception\\n"'


@pytest.mark.parametrize("script", [pytest.param(DDP, id="ddp"), pytest.param(REDUCE, id="all-reduce")])
def test_four_ranks_without_destroy_succeed(script: str, tmp_path: Path) -> None:
    """Scripts that end without destroy_process_group exit 0 on four ranks, every time."""
    write_script(tmp_path, script)
    ends = [run_rankwise(["--nproc-per-node", "4", "train.py"], tmp_path) for _ in range(RUNS)]
    assert [end.code for end in ends] == [0] * RUNS, ends[0].err


@pytest.mark.parametrize("flags", [[], ["--cold"]], ids=["warm", "cold"])
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param('dist.init_process_group("gloo")', "dist.destroy_process_group()", id="torch"),
        pytest.param('import rankwise; ctx = rankwise.init("gloo")', "ctx.close()", id="rankwise"),
    ],
)
def test_a_model_that_outlives_its_group_does_not_hang(flags: list[str], begin: str, end: str, tmp_path: Path) -> None:
    """A DDP model that goes after destroy_process_group ends, though torch's thread has not dropped its last work by then."""
    write_script(tmp_path, DEADLOCK.replace("INIT", begin).replace("DESTROY", end))
    result = run_rankwise([*flags, "--nproc-per-node", "2", "train.py"], tmp_path, timeout_s=30)
    assert result.code == 0, result.err


def test_an_abort_after_the_script_is_a_success_with_a_note(tmp_path: Path) -> None:
    """A rank that finished its script and is then aborted with torch's line counts as a success, and this is told."""
    write_script(tmp_path, ABORT.replace("TEXT", LINE))
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "work done\nwork done\n"), result.err
    assert report["kind"] == "ok"
    assert any("abort" in note for note in report["notes"])
    assert "counted as success" in result.err


def test_an_abort_of_one_does_not_stop_the_others(tmp_path: Path) -> None:
    """While other ranks still work, such an abort of one stops nobody."""
    body = ABORT.replace("TEXT", LINE).replace(
        'print("work done", flush=True)', 'import time\n    time.sleep(float(os.environ["RANK"]))'
    )
    write_script(tmp_path, body)
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path)
    assert (result.code, report["kind"]) == (0, "ok"), result.err


@pytest.mark.parametrize("args", [["-t", "3"], ["-r", "3"]], ids=" ".join)
def test_an_abort_into_a_log_file_is_forgiven_too(args: list[str], tmp_path: Path) -> None:
    """The line is looked for where standard error goes: in a file with -r and -t."""
    write_script(tmp_path, ABORT.replace("TEXT", LINE))
    assert run_rankwise([*args, "--log-dir", "logs", "train.py"], tmp_path).code == 0


def test_another_abort_after_the_script_is_a_failure(tmp_path: Path) -> None:
    """An abort at exit with another message is no success: it may be a lost checkpoint."""
    write_script(tmp_path, ABORT.replace("TEXT", 'b"free(): invalid pointer\\n"'))
    result, report = run_reported(["train.py"], tmp_path)
    assert (result.code, report["kind"]) == (134, "failure")
    assert "free(): invalid pointer" in report["message"] + report["last_words"]


def test_the_same_abort_in_the_middle_is_a_failure(tmp_path: Path) -> None:
    """The same line before the script is through is a failure."""
    write_script(tmp_path, f"import os\nos.write(2, {LINE}); os.abort()\n")
    result, report = run_reported(["train.py"], tmp_path)
    assert (result.code, report["kind"], report["culprits"]) == (134, "failure", [0])


def test_an_error_then_the_abort_is_the_error(tmp_path: Path) -> None:
    """A script that raised and then aborts at exit failed with its exception."""
    write_script(tmp_path, ABORT.replace("TEXT", LINE) + '    raise ValueError("real")\n')
    result, report = run_reported(["train.py"], tmp_path)
    assert result.code != 0
    assert "ValueError: real" in report["message"]
    assert json.dumps(report["kind"]) == '"failure"'


def test_the_abort_of_one_rank_hides_no_other_ranks_exit_code(tmp_path: Path) -> None:
    """Both ranks say sys.exit(3), and one of them is then aborted: the job fails with the 3 of the other."""
    abort = textwrap.dedent(ABORT.replace("TEXT", LINE))
    write_script(
        tmp_path,
        f"import os, sys\nif os.environ['RANK'] == '0':\n{textwrap.indent(abort, '    ')}\nsys.exit(3)\n",
    )
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["culprits"]) == (3, "failure", [1]), result.err
