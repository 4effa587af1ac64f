"""Real replicas that drift apart are told, with the cause; what is meant to differ is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from evidence_ranks import recorded_ranks
from python_forks import TRAINING
from rankwise.cli.main import main
from rankwise.evidence.reader.scene import RankFacts, Scene
from rankwise.verdict.run_rules import look
from support import line_of, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.verdict.finding import JobFinding

pytestmark = pytest.mark.linux
TWO = ["--nproc-per-node", "2"]
_HEAD = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(4, 4) * (rank + 1)

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

def train(forward, model, steps=6, sync=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = forward(x.to(next(model.parameters()).dtype)).square().sum()
        loss.backward()
        optimizer.step()
        if sync:
            sync(model, optimizer, step)
"""
_DRIFTS = """
bypassed = DDP(net())  # bypassed
train(bypassed.module, bypassed)

evaluated = DDP(net())  # evaluated
with torch.no_grad():
    evaluated(x)
train(evaluated.module, evaluated)

grown = DDP(net())  # D8
grown.module.append(nn.Linear(2, 2))
train(grown, grown)

thawed = net()
thawed[0].requires_grad_(False)
thawed = DDP(thawed)  # D9
thawed.module[0].requires_grad_(True)
train(thawed, thawed)

moved = DDP(net())  # D10
moved.double()
train(moved, moved)

def hold(x):
    with local.no_sync():
        return local(x)

local = DDP(net())  # D23
train(hold, local)

loaded = DDP(net())  # D26
if rank == 0:
    loaded.module.load_state_dict(net().state_dict())
train(loaded, loaded)

def slow_down(model, optimizer, step):
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.001

paced = DDP(net())  # no class
train(paced, paced, sync=slow_down)
"""
_MEANT = """
def average(model, optimizer, step):
    if step % 40 == 39:
        for one in model.parameters():
            dist.all_reduce(one.data)
            one.data /= size

sound = DDP(net())
def accumulate(x):
    with sound.no_sync():
        sound(x).sum().backward()
    return sound(x)
train(accumulate, sound, 70)
train(torch.compile(sound, backend="eager"), sound)

local = DDP(net())
def hold(x):
    with local.no_sync():
        return local(x)
train(hold, local, 70, average)

joined = DDP(net())
optimizer = torch.optim.SGD(joined.parameters(), lr=0.01)
for epoch in range(4):
    with joined.join():
        for _ in range(3 + rank):
            joined(x).sum().backward()
            optimizer.step()

apart = net()
DDP._set_params_and_buffers_to_ignore_for_model(apart, ["2.weight", "2.bias"])
apart = DDP(apart)
train(apart, apart)

def keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
keep.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
hooked = DDP(net())
hooked.register_comm_hook(None, keep)
train(hooked, hooked)

maker, critic, own = DDP(net()), DDP(nn.Linear(2, 1)), nn.Linear(2, 1)
makers, critics, owns = (torch.optim.Adam(one.parameters()) for one in (maker, critic, own))
for _ in range(6):
    critic(maker(x).detach()).sum().backward()
    critics.step()
    critic(maker(x)).sum().backward()
    makers.step()
    if rank == 0:
        own(torch.ones(2)).sum().backward()
        owns.step()
"""


#: No more than eight models in all, of which a rank keeps the digests.
_UNDONE = """
def in_pieces(model, optimizer, step):
    with torch.no_grad():
        for one in model.parameters():
            for piece in one.view(-1).split(3):
                dist.all_reduce(piece)
                piece /= size

chunked = DDP(net())
def hold_chunked(x):
    with chunked.no_sync():
        return chunked(x)
train(hold_chunked, chunked, 6, in_pieces)

adapted = DDP(net())
train(adapted, adapted, 20)
for _ in range(2):
    kept = {name: one.clone() for name, one in adapted.module.state_dict().items()}
    train(adapted.module, adapted.module, 70)
    adapted.module.load_state_dict(kept)

filed = DDP(net())  # filed
train(filed.module, filed)
dist.barrier()
filed.module.load_state_dict(net().state_dict())

def finish(model):
    train(model.module, model)
    model.module.load_state_dict(net().state_dict())
gone = DDP(net())
finish(gone)
best = DDP(net())
train(best, best)
if rank == 0:
    best.module.load_state_dict(net().state_dict())
"""


def _look_at(folder: Path, text: str, *, env: dict[str, str] | None = None) -> tuple[dict[str, JobFinding], Path]:
    """Run a script on two ranks, and return what is seen of it when both are over, by the user's line."""
    script = write_script(folder, _HEAD + text)
    with recorded_ranks(script, 2, env=env or {}, modules=TRAINING) as ranks:
        for one in ranks:
            code, _, err = one.finish()
            assert code == 0, err
        facts = tuple(
            RankFacts(rank=number, state="ended", code=0, ended_s=0.0, evidence=one.read())
            for number, one in enumerate(ranks)
        )
    findings = look(Scene(ranks=facts, world_size=2, now_s=0.0))
    return {finding.where or "": finding for finding in findings if finding.is_drift}, script


def test_each_cause_is_told_apart(tmp_path: Path) -> None:
    """D7 to D10, D23, D26 and learning rates that differ, of eight models in one job: the class, the line that wrapped, the parameters."""
    findings, script = _look_at(tmp_path, _DRIFTS)
    expected: dict[str, str | None] = {"# bypassed": "D7", "# evaluated": "D7", "# D8": "D8", "# D9": "D9", "# D10": "D10", "# D23": "D23", "# D26": "D26", "# no class": None}  # fmt: skip
    found = {line: finding.class_id for line, finding in findings.items()}
    assert found == {line_of(script, mark): class_id for mark, class_id in expected.items()}
    assert "learning rates differ: 0.01 on rank 0; 0.001 on rank 1" in findings[line_of(script, "# no class")].message  # fmt: skip
    added, unfrozen = findings[line_of(script, "# D8")].message, findings[line_of(script, "# D9")].message
    assert "3.weight, 3.bias (2 of 6 parameters) differ" in added
    assert "0.weight, 0.bias (2 of 4 parameters) differ" in unfrozen
    assert "already before the first step" in findings[line_of(script, "# D26")].message


def test_what_is_meant_to_differ_is_not_told(tmp_path: Path) -> None:
    """Accumulation, compiled models, averaging by hand, uneven inputs, ignored parameters, hooks of one's own, one rank's own model."""
    assert _look_at(tmp_path, _MEANT) == ({}, tmp_path / "train.py")


def test_what_is_made_equal_again_is_not_told(tmp_path: Path) -> None:
    """Averaging in pieces, adapting on each rank and restoring, weights from files at the end, rank 0 loading its best state."""
    assert _look_at(tmp_path, _UNDONE) == ({}, tmp_path / "train.py")
    findings, script = _look_at(tmp_path, _UNDONE + "filed.module[0].weight.data += rank\n")
    assert {line: (finding.class_id, finding.is_proof) for line, finding in findings.items()} == {
        line_of(script, "# filed"): ("D7", True)
    }


@pytest.mark.parametrize(
    ("end", "is_proof"),
    [
        ("dist.destroy_process_group()", True),
        ("", True),
        (
            "dist.destroy_process_group()\nif rank == 0:\n    bypassed.module.load_state_dict(net().state_dict())",
            True,
        ),
        ("import os; os._exit(0)", False),
        ("del bypassed", False),
    ],
)
def test_the_digest_of_the_end_makes_the_proof(end: str, *, is_proof: bool, tmp_path: Path) -> None:
    """It is taken when the groups go, or at exit; where there is none, what was seen before is a suspicion."""
    findings, _ = _look_at(tmp_path, _DRIFTS.partition("evaluated =")[0] + end)
    (finding,) = findings.values()
    assert (finding.class_id, finding.is_proof) == ("D7", is_proof)


def test_no_digest_is_taken_on_the_way_out_of_an_exception(tmp_path: Path) -> None:
    """An exception that reaches destroy_process_group in a finally clause leaves the ranks wherever it was."""
    end = "try:\n    try:\n        raise ValueError\n    finally:\n        dist.destroy_process_group()\nexcept ValueError:\n    import os; os._exit(0)\n"
    (finding,) = _look_at(tmp_path, _DRIFTS.partition("evaluated =")[0] + end)[0].values()
    assert not finding.is_proof


def test_a_model_that_nobody_wrapped(tmp_path: Path) -> None:
    """D7: the data is shared by a DistributedSampler, and nothing else; with gradients averaged by hand nothing is told."""
    text = "DistributedSampler(range(8))\nmodel = net()\ntrain(model, model)\n"
    (finding,) = _look_at(tmp_path, text)[0].values()
    assert (finding.rule, finding.class_id, finding.culprits) == ("never_wrapped", "D7", (0, 1))
    assert not finding.is_proof
    shared = "model = net()\nfor one in model.parameters():\n    one.register_hook(lambda grad: dist.all_reduce(grad) or grad / size)\n"
    assert not _look_at(tmp_path, f"DistributedSampler(range(8))\n{shared}train(model, model)\n")[0]


def test_a_drift_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job ends as it does, with a mismatch in the report, and again from the folder; only --strict makes its exit code 1."""
    script = write_script(tmp_path, _HEAD + _DRIFTS.partition("evaluated =")[0])
    result, report = run_reported([*TWO, "--log-dir", "logs", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["class"]) == (0, "mismatch", "D7")
    assert report["where"] == line_of(script, "bypassed = DDP")
    assert main(["report", report["evidence"], "--json"]) == 0
    again: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (again["kind"], again["class"], again["message"]) == ("mismatch", "D7", report["message"])
    strict, report = run_reported([*TWO, "--strict", "--no-check", "train.py"], tmp_path)
    assert (strict.code, report["kind"]) == (1, "mismatch")


def test_torchs_warnings_name_the_users_line(tmp_path: Path) -> None:
    """What DistributedDataParallel warns of is told at the line that makes one, as without us: filters by module go by it."""
    text = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    DDP(net(), device_ids=[], gradient_as_bucket_view=True, broadcast_buffers=False)
assert all(one.filename == __file__ for one in caught), [str(one) for one in caught]
assert DDP.__init__.__code__.co_filename.endswith("nn/parallel/distributed.py")
"""
    assert _look_at(tmp_path, text)[0] == {}


def test_digests_can_be_switched_off(tmp_path: Path) -> None:
    """With RANKWISE_DIGESTS=0 nothing of the model is read, and torch's classes are as they were."""
    text = "assert not hasattr(DDP._ddp_init_helper, '__wrapped__')\nfrom torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\nassert not hooks\n"
    assert not _look_at(tmp_path, text + _DRIFTS.partition("evaluated =")[0], env={"RANKWISE_DIGESTS": "0"})[0]
