"""A scheduler's notice to a job with parameter servers: workers stop, servers save and end after them, and the next start goes on from there."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, Running, wait_until, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from support import Result

pytestmark = pytest.mark.linux

#: A parameter is the number of gradients that were applied; a table has a row that counts them too. Workers stop at 400 updates.
TRAIN = """
    import json, os, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import rankwise

    listens = json.loads(sys.argv[1])
    ctx = rankwise.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.table = rankwise.ServedEmbedding(8, 1, std=0.0)

    model = Model()
    ps = rankwise.parameter_server(
        model, lambda ones: torch.optim.SGD(ones, lr=1.0), mode="async", recovery_folder="copies"
    )
    if ps.is_server:
        Path(f"pid-{ctx.rank}").write_text(str(os.getpid()))
        ps.serve()
    else:
        if listens:
            ctx.listen_for_stop()
        while ps.pull() < 400:
            rows = model.table(torch.tensor([3]))
            (-rows.sum()).backward()
            model.count.grad = -torch.ones(1, dtype=torch.float64)
            ps.push()
            with Path(f"sent-{ctx.rank}").open("a") as file:
                file.write(".")
            time.sleep(0.02)  # a step of a real model takes longer
            if listens and ctx.should_stop():
                break
        ps.pull()
        told = {"count": model.count.item(), "row": model.table(torch.tensor([3])).item(), "stopped": bool(ctx.stop_reason)}
        print(json.dumps(told), flush=True)
    if ctx.stop_reason:
        ctx.leave_for_requeue()
    ctx.close()
"""


def start(folder: Path, listens: str = "true") -> Running:
    write_script(folder, TRAIN)
    return Running([*RANKWISE, "--role-counts", "ps=2,worker=2", "--max-restarts", "2", "train.py", listens], folder)


def wait_for_steps(folder: Path, num_steps: int) -> None:
    wait_until(lambda: sum(path.stat().st_size for path in folder.glob("sent-*")) >= num_steps, 60, "steps")


def finish(job: Running) -> Result:
    try:
        return job.finish(60)
    finally:
        job.process.kill()
        job.process.wait()


@pytest.mark.parametrize("whom", ["launcher", "server"])
def test_a_job_that_is_stopped_goes_on_where_its_servers_were(whom: str, tmp_path: Path) -> None:
    """SIGTERM to the launcher, or to one server: exit code 75, no restart, and the next run has every gradient of the first, tables included."""
    job = start(tmp_path)
    wait_for_steps(tmp_path, 40)
    os.kill(job.process.pid if whom == "launcher" else int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    result = finish(job)
    assert result.code == 75, result.err
    assert "is restarted alone" not in result.err
    assert "resumes shard" not in result.err
    sent = sum(path.stat().st_size for path in tmp_path.glob("sent-*"))
    saved = dict(re.findall(r"shard (\d) is saved at version (\d+): the next run resumes from", result.err))
    assert saved == {"0": str(sent), "1": "0", "2": "0", "3": str(sent)}
    (folder,) = (tmp_path / "copies" / "servers" / "1").glob("stopped-*")
    assert len(list(folder.glob("shard-*.pt"))) == 4

    result = finish(start(tmp_path))
    assert result.code == 0, result.err
    assert f"server 0 resumes shard 0 at version {sent}" in result.err
    sent = sum(path.stat().st_size for path in tmp_path.glob("sent-*"))
    told = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    assert max(one["count"] for one in told) == max(one["row"] for one in told) == sent
    assert not any(one["stopped"] for one in told)
    assert not list((tmp_path / "copies" / "servers" / "1").glob("stopped-*"))


def test_servers_save_without_workers_that_do_not_listen(tmp_path: Path) -> None:
    """SIGTERM ends these workers; servers wait for none of them to be started again, save what they have, and leave for a requeue."""
    job = start(tmp_path, "false")
    wait_for_steps(tmp_path, 10)
    os.kill(job.process.pid, signal.SIGTERM)
    result = finish(job)
    assert result.code == 75, result.err
    assert "is restarted alone" not in result.err
    assert result.err.count("the next run resumes from") == 4
    assert "Traceback" not in result.err
