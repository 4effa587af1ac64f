"""Ranks of several nodes use localhost as the rendezvous address, which is a different host on each node.

**Why it breaks.** Each node looks for rank 0 on itself. All but the first wait for a store that is not there, and the
first waits for them, until the timeout.

Bad:

```python
import argparse
import os

import torch.distributed as dist
import torch.multiprocessing as mp


def work(gpu, args, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=args.node * args.gpus + gpu, world_size=args.nodes * args.gpus)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--node", type=int)
    parser.add_argument("--gpus", type=int)
    args = parser.parse_args()
    mp.spawn(work, args=(args, "29511"), nprocs=args.gpus)
```

Good:

```python
import argparse
import os

import torch.distributed as dist
import torch.multiprocessing as mp


def work(gpu, args):
    os.environ["MASTER_ADDR"] = args.master
    os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("gloo", rank=args.node * args.gpus + gpu, world_size=args.nodes * args.gpus)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--node", type=int)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--master", required=True)
    parser.add_argument("--port", required=True)
    args = parser.parse_args()
    mp.spawn(work, args=(args,), nprocs=args.gpus)
```

**When it says nothing.** Scripts of one node, ``setdefault``, and code after a test of the number of nodes.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, once, places, settings
from rankwise.lint.topics.option_text import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_STORE = "torch.distributed.TCPStore"
_HERE = re.compile(r"(tcp://)?(localhost|127\.0\.0\.1|\[?::1\]?)(:\d+)?$")
_NODES = frozenset(
    {"nodes", "nnodes", "num_nodes", "n_nodes", "num_machines", "nnode", "node_count", "NUM_NODES", "NNODES"}
)
_CLUSTER = frozenset({"SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NODEID"})


def check(script: Script) -> Iterator[Finding]:
    """Addresses of this host in a script for several."""
    if not any(word in script.piece.code for word in ("localhost", "127.0.0.1", "::1")):
        return
    several = _several(script)
    if several is None:
        return
    why, is_certain, declared = several
    for place, value, node in _addresses(script):
        if isinstance(value.const, str) and _HERE.match(value.const) and not _tested(place):
            if declared is not None and declared.excludes(place.last):
                continue  # the cluster's nodes get another address
            yield script.finding(
                RULE,
                node,
                f"{value.const!r} is a different host on each node, and {why}: the nodes never connect",
                "give the first node's name or address",
                severity="error" if is_certain and place.entry.is_program else "warning",
            )


def _addresses(script: Script) -> Iterator[tuple[Place, Value, ast.AST]]:
    for setting in settings(script):
        if setting.key == "MASTER_ADDR":
            yield setting.place, setting.value, setting.node
    for place in once(places(script, INIT, _STORE)):
        position, name = (1, "init_method") if place.last.name == INIT else (0, "host_name")
        value, node = place.last.arg(position, name), place.last.arg_node(position, name)
        if value is not None and node is not None:
            yield place, value, node


def _several(script: Script) -> tuple[str, bool, Call | None] | None:
    """How it is known that there may be several nodes, whether there are, and the call that asks."""
    for option in options(script.tree):
        if option.dest in _NODES:
            default = getattr(option.default, "value", None)
            is_more = isinstance(default, int) and default > 1
            return (
                f"{option.flags[-1]} {'is ' + str(default) if is_more else 'may be more than 1'}",
                is_more,
                None,
            )
    for node in ast.walk(script.tree):
        if (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and isinstance(node.value, ast.Constant)
            and type(node.value.value) is int
        ):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = getattr(target, "id", getattr(target, "attr", ""))
            if name in _NODES and node.value.value > 1:
                return f"{name} is {node.value.value}", True, None
    for call in script.all_calls:
        if (
            call.name in {"os.environ.__getitem__", "os.environ.get", "os.getenv"}
            and call.args
            and call.args[0].const in _CLUSTER
        ):
            return f"{call.args[0].const} is read", True, call
    return None


def _tested(place: Place) -> bool:
    return any(
        "node" in ast.unparse(test).lower() or "environ" in ast.unparse(test)
        for test, _, _ in place.last.tests
    )


RULE: Rule[Script] = Rule(
    id="RW209",
    name="localhost-on-several-nodes",
    severity="error",
    classes=("I4",),
    summary="ranks of several nodes use localhost as their rendezvous",
    check=check,
)
