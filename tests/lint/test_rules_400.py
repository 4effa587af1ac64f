"""Rules about wrapped models (RW401 to RW418): found in several spellings, silent on what is legal."""

from __future__ import annotations

import textwrap

import pytest

from lint.test_rules_300 import found

HEAD = """\
import contextlib, copy, os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
"""
NET = "class Net(nn.Linear):\n    weight = bias = None\n    def __init__(self):\n        super().__init__(4, 1)\n"
STEP = "\nopt = torch.optim.SGD(net.parameters(), 0.1)\nnet(torch.rand(2, 4)).sum().backward()\nopt.step()\n"
BAD = {
    ("RW401", "in a class"): """
        class Loop:
            def __init__(self):
                self.net = nn.Linear(4, 1)
                self.opt = torch.optim.Adam(self.net.parameters())
            def run(self):
                loss = nn.functional.mse_loss(self.net(torch.rand(2, 4)), torch.rand(2, 1))
                loss.backward()
                self.opt.step()
        Loop().run()
    """,
    ("RW401", "only a metric is reduced"): f"net = nn.Linear(4, 1){STEP}loss = torch.rand(1)\ndist.all_reduce(loss)",
    ("RW402", "a method of the model inside"): """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 1)
            def loss(self, x):
                return self.a(x).mean()
        ddp = DDP(Net())
        ddp.module.loss(torch.rand(2, 4)).backward()
    """,
    ("RW402", "a method of a model whose class is elsewhere"): """
        from nets import Net, describe
        ddp = DDP(Net())
        describe(ddp)
        ddp.module.loss(torch.rand(2, 4)).backward()
    """,
    ("RW402", "wrapped and trained bare in the same setting"): """
        def train(args):
            net = nn.Linear(4, 1)
            if args.ddp:
                ddp = DDP(net)
                net(torch.rand(2, 4)).sum().backward()
    """,
    ("RW403", "in the loop"): """
        net = DDP(nn.Linear(4, 1))
        for x in [torch.rand(2, 4)]:
            out = net(x)
            if (x > 0.5).any():
                loss = out.mean()
            else:
                loss = torch.zeros((), requires_grad=True)
            loss.backward()
    """,
    ("RW404", "setattr"): "net = DDP(nn.Sequential(nn.Linear(4, 4)))\nsetattr(net.module, 'head', nn.Linear(4, 2))",
    ("RW404", "add_module"): "net = nn.Sequential(nn.Linear(4, 4))\nddp = DDP(net)\nnet.add_module('head', nn.Linear(4, 2))",
    ("RW405", "loop over parameters"): """
        net = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        for p in net.module[0].parameters():
            p.requires_grad = False
        net(torch.rand(2, 4)).sum().backward()
    """,
    ("RW406", "to the cpu and back"): """
        net = DDP(nn.Linear(4, 1).cuda())
        for epoch in range(2):
            net(torch.rand(2, 4)).sum().backward()
            net.cpu()
            net.cuda()
    """,
    ("RW407", "after wrapping"): "net = DDP(nn.BatchNorm1d(4).cuda())\nnet = nn.SyncBatchNorm.convert_sync_batchnorm(net)",
    ("RW408", "around the epoch"): """
        net = DDP(nn.Linear(4, 1))
        opt = torch.optim.SGD(net.parameters(), 0.1)
        with net.no_sync():
            for x in [torch.rand(2, 4)]:
                net(x).sum().backward()
                opt.step()
    """,
    ("RW408", "around the backward pass"): """
        net = DDP(nn.Linear(4, 1))
        loss = net(torch.rand(2, 4)).sum()
        with net.no_sync():
            loss.backward()
    """,
    ("RW409", "flat"): """
        net = nn.Linear(4, 1)
        net(torch.rand(2, 4)).sum().backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        dist.all_reduce(flat)
    """,
    ("RW410", "the wrapper itself"): "net = DDP(nn.Linear(4, 1))\nif not rank:\n    net.load_state_dict(torch.load('a.pt'))",
    ("RW412", "FSDP"): """
        from torch.distributed.fsdp import FullyShardedDataParallel
        net = nn.Linear(4, 1)
        opt = torch.optim.Adam([{'params': net.parameters()}])
        net = FullyShardedDataParallel(net)
    """,
    ("RW416", "batch norm"): "net = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))\nnet(torch.rand(2, 4)).sum().backward()",
    ("RW418", "the user's layer, in a function"): """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 1)
            def loss(self, x):
                return self.fc(x).mean()
        def main():
            net = DDP(Net())
            for _ in range(3):
                print(net.fc.weight)
        main()
    """,
    ("RW419", "in a loop"): """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        net = FSDP(nn.Linear(4, 1).cuda())
        for _ in range(3):
            net(torch.rand(2, 4)).sum().backward()
            nn.utils.clip_grad_norm_(parameters=net.parameters(), max_norm=0.5)
    """,
    ("RW419", "in a class"): """
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        class Job:
            def __init__(self):
                self.net = FullyShardedDataParallel(nn.Linear(4, 1), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
            def step(self):
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        Job().step()
    """,
}  # fmt: skip
LEGAL = {
    ("RW418", "DDP's own"): NET + "net = DDP(Net())\nprint(net.module.weight, net.device, net.parameters, net.no_sync, net.training)",
    ("RW418", "before"): NET + "net = Net()\nprint(net.weight)\nnet = DDP(net)",
    ("RW418", "unwrapped again"): NET + "net = DDP(Net())\nnet = net.module\nprint(net.weight)",
    ("RW418", "on one path"): NET + "net = Net()\nif world > 8:\n    net = DDP(net)\nprint(net.weight)",
    ("RW418", "asked first"): NET + "net = DDP(Net())\nif hasattr(net, 'weight'):\n    print(net.weight)",
    ("RW418", "sharded"): NET + "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nnet = FSDP(Net())\nprint(net.weight)",
    ("RW418", "given to the wrapper"): NET + "net = DDP(Net())\nnet.bias = 3\nprint(net.bias)",
    ("RW401", "wrapped"): f"net = DDP(nn.Linear(4, 1)){STEP}",
    ("RW401", "gradients by hand"): """
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        net(torch.rand(2, 4)).sum().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
    """,
    ("RW401", "evaluation"): "net = nn.Linear(4, 1)\nwith torch.no_grad():\n    net(torch.rand(2, 4))",
    ("RW402", "evaluation of the model inside"): f"net = DDP(nn.Linear(4, 1)){STEP}with torch.no_grad():\n    net.module(torch.rand(2, 4))",
    ("RW402", "a function elsewhere may call the wrapped model"): """
        from nets import Net, step
        ddp = DDP(Net())
        (step(ddp) + ddp.module.penalty()).backward()
    """,
    ("RW402", "wrapped in some settings"): """
        def build(net, path):
            if os.path.isfile(path):
                return net
            return DDP(net)
        build(nn.Linear(4, 1), "a.pt")(torch.rand(2, 4)).sum().backward()
        def train(args):
            net = nn.Linear(4, 1)
            if args.ddp:
                net = DDP(net)
            net(torch.rand(2, 4)).sum().backward()
    """,
    ("RW403", "depends on a setting"): """
        def loss_of(out, weight):
            return torch.tensor(0.0) if weight == 0 else out.mean() * weight
        net = DDP(nn.Linear(4, 1))
        loss_of(net(torch.rand(2, 4)), 1).backward()
    """,
    ("RW403", "a start for a sum"): """
        net = DDP(nn.Linear(4, 1))
        loss = torch.zeros(1)
        for x in [torch.rand(2, 4)]:
            loss = loss + net(x).mean()
        loss.backward()
    """,
    ("RW404", "before"): "net = nn.Sequential(nn.Linear(4, 4))\nnet.add_module('head', nn.Linear(4, 2))\nddp = DDP(net)",
    ("RW404", "a number"): "net = DDP(nn.Linear(4, 4))\nnet.module.steps = 3",
    ("RW405", "off and on in turn"): """
        net = DDP(nn.Linear(4, 1))
        for _ in range(3):
            net.requires_grad_(False)
            net.requires_grad_(True)
            net(torch.rand(2, 4)).sum().backward()
    """,
    ("RW405", "before, and the wrapped one keeps the name"): """
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for p in net.parameters():
            p.requires_grad = False
        net[1].weight.requires_grad = True
        net = DDP(net)
        net(torch.rand(2, 4)).sum().backward()
    """,
    ("RW406", "at the end"): f"net = DDP(nn.Linear(4, 1)){STEP}torch.save(net.module.cpu().state_dict(), 'a.pt')",
    ("RW407", "first"): "net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)).cuda()\nnet = DDP(net)",
    ("RW408", "the last one outside"): """
        net = DDP(nn.Linear(4, 1))
        opt = torch.optim.SGD(net.parameters(), 0.1)
        with net.no_sync():
            net(torch.rand(2, 4)).sum().backward()
        net(torch.rand(2, 4)).sum().backward()
        opt.step()
    """,
    ("RW409", "mean"): "net = nn.Linear(4, 1)\nfor p in net.parameters():\n    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
    ("RW409", "scaled loss"): """
        net = nn.Linear(4, 1)
        (net(torch.rand(2, 4)).sum() / world).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
    """,
    ("RW410", "before wrapping"): "net = nn.Linear(4, 1)\nif rank == 0:\n    net.load_state_dict(torch.load('a.pt'))\nnet = DDP(net)",
    ("RW412", "kept parameters"): """
        from torch.distributed.fsdp import FullyShardedDataParallel
        net = nn.Linear(4, 1)
        opt = torch.optim.Adam(net.parameters())
        net = FullyShardedDataParallel(net, use_orig_params=True)
    """,
    ("RW416", "converted"): "net = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4).cuda()))\nnet(torch.rand(2, 4)).sum().backward()",
    ("RW419", "its own method"): """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        net = FSDP(nn.Linear(4, 1).cuda())
        net(torch.rand(2, 4)).sum().backward()
        net.clip_grad_norm_(1.0)
    """,
    ("RW419", "fully_shard"): """
        from torch.distributed.fsdp import fully_shard
        net = nn.Linear(4, 1)
        fully_shard(net)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    """,
    ("RW419", "DDP"): "net = DDP(nn.Linear(4, 1))\nnn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    ("RW419", "NO_SHARD"): """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
        net = FSDP(nn.Linear(4, 1), sharding_strategy=ShardingStrategy.NO_SHARD)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    """,
    ("RW419", "strategy from outside"): """
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        def build(strategy):
            net = FSDP(nn.Linear(4, 1), sharding_strategy=strategy)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        build(os.environ["STRATEGY"])
    """,
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "code"), BAD.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_mistake_is_found(case: tuple[str, str], code: str) -> None:
    """The mistake is found in this spelling."""
    assert found(case[0], HEAD + textwrap.dedent(code))


@pytest.mark.parametrize(
    ("case", "code"), LEGAL.items(), ids=lambda one: " ".join(one) if isinstance(one, tuple) else "code"
)
def test_legal_form_is_left_alone(case: tuple[str, str], code: str) -> None:
    """What looks alike and is right has no finding."""
    assert found(case[0], HEAD + textwrap.dedent(code)) == []
