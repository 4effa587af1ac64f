"""An attribute of the inner model is read from the DistributedDataParallel around it.

**Why it breaks.** DDP does not forward attributes: after ``net = DDP(Net())``, ``net.fc`` raises ``AttributeError:
'DistributedDataParallel' object has no attribute 'fc'``. The model is ``net.module``.

Bad:

```python
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = DDP(nn.Linear(4, 1))
print(net.weight.norm())
dist.destroy_process_group()
```

Good:

```python
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
net = DDP(nn.Linear(4, 1))
print(net.module.weight.norm())
dist.destroy_process_group()
```

**When it says nothing.** Attributes of DDP itself, FSDP and ``torch.compile`` (they forward attributes), a model that
is wrapped on one path only, names that hold something else in between.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import above, function_of, parents_of, statement_of
from rankwise.lint.topics.tensor_text import is_behind, is_in, key_of, nodes_in
from rankwise.lint.topics.wrapping import wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap

# What DDP has besides a module's own methods.
_OF_DDP = frozenset({"device", "device_ids", "device_type", "dim", "module", "gather", "scatter", "logger", "reducer", "join", "join_hook",
                     "join_device", "join_process_group", "no_sync", "static_graph", "output_device", "process_group", "mixed_precision",
                     "broadcast_buffers", "bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "training",
                     "parameters_to_ignore", "modules_buffers", "to_kwargs", "register_comm_hook", "will_sync_module_buffers",
                     "require_backward_grad_sync", "require_forward_param_sync", "named_module_buffers", "batched_grad_copy",
                     "forward", "forward_sync_buffers", "type", "float", "T_destination", "dump_patches", "call_super_init"})  # fmt: skip
_OF_MODULE = frozenset({"add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double", "eval", "extra_repr",
                        "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "load_state_dict", "modules",
                        "mtia", "named_buffers", "named_children", "named_modules", "named_parameters", "parameters",
                        "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
                        "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
                        "register_load_state_dict_pre_hook", "register_module", "register_parameter", "requires_grad_",
                        "register_state_dict_post_hook", "register_state_dict_pre_hook", "set_extra_state", "set_submodule",
                        "share_memory", "state_dict", "to", "to_empty", "train", "xpu", "zero_grad"})  # fmt: skip
# Attributes of layers that neither a module nor DDP has.
_OF_LAYERS = frozenset({"weight", "bias", "in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride",
                        "running_mean", "running_var", "num_embeddings", "embedding_dim", "hidden_size"})  # fmt: skip
_MODELS = frozenset({"torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d", "torch.nn.Embedding", "torch.nn.LayerNorm",
                     "torch.nn.Sequential", "torch.nn.LSTM", "torch.nn.GRU"})  # fmt: skip


def check(script: Script) -> Iterator[Finding]:
    """Reads of attributes that only the wrapped model has."""
    seen: set[int] = set()
    for wrap in wraps(script):
        if wrap.kind != DDP or wrap.call.name != DDP or not is_in(script.tree, wrap.call.node):
            continue
        statement = statement_of(script.tree, wrap.call.node)
        if not isinstance(statement, ast.Assign) or statement.value is not wrap.call.node:
            continue
        for node in _reads(script.tree, wrap, statement):
            if id(node) not in seen and _only_inside(wrap, node.attr):
                seen.add(id(node))
                name = ast.unparse(node.value)
                yield script.finding(
                    RULE,
                    node,
                    f"`{name}` is a DistributedDataParallel, which has no `{node.attr}`, only the model inside has: AttributeError",
                    f"write `{name}.module.{node.attr}`",
                )


def _reads(tree: ast.Module, wrap: Wrap, statement: ast.stmt) -> Iterator[ast.Attribute]:
    """Attributes read from the wrapper in code that certainly runs after wrapping."""
    around = next(above(tree, statement), None)
    nodes = nodes_in(function_of(tree, statement))
    given = {
        one.attr
        for one in parents_of(tree)
        if isinstance(one, ast.Attribute)
        and not isinstance(one.ctx, ast.Load)
        and key_of(one.value) in wrap.names
    }
    stores = [
        one
        for one in nodes
        if isinstance(one, (ast.Name, ast.Attribute))
        and not isinstance(one.ctx, ast.Load)
        and key_of(one) in wrap.names
        and is_behind(one, statement)
    ]
    for one in nodes:
        if (
            isinstance(one, ast.Attribute)
            and isinstance(one.ctx, ast.Load)
            and key_of(one.value) in wrap.names
            and one.attr not in given
            and is_behind(one, statement)
            and not any(is_behind(one, store) for store in stores)
            and _is_in_same_block(tree, one, statement, around)
        ):
            yield one


def _is_in_same_block(tree: ast.Module, node: ast.AST, statement: ast.stmt, around: ast.AST | None) -> bool:
    inner = node
    for one in above(tree, node):
        if one is around:
            block = next((b for b in ("body", "orelse", "finalbody") if statement in getattr(one, b, ())), "")
            return bool(block) and inner in getattr(one, block)
        if isinstance(one, ast.Try) or (isinstance(one, (ast.If, ast.IfExp, ast.BoolOp)) and _asks_kind(one)):
            return False
        inner = one
    return False


def _asks_kind(node: ast.If | ast.IfExp | ast.BoolOp) -> bool:
    text = ast.unparse(node if isinstance(node, ast.BoolOp) else node.test)
    return "isinstance" in text or "hasattr" in text or "type(" in text


def _only_inside(wrap: Wrap, attr: str) -> bool:
    if attr in _OF_DDP or attr in _OF_MODULE or attr.startswith("_"):
        return False
    thing = wrap.inner.thing
    if isinstance(thing, Instance):
        return attr in thing.attrs or thing.cls.find(attr) is not None
    return isinstance(thing, Object) and thing.kind in _MODELS and attr in _OF_LAYERS


RULE: Rule[Script] = Rule(
    id="RW418",
    name="attribute-of-the-model-inside",
    severity="error",
    classes=(),
    summary="an attribute of the inner model is read from the DistributedDataParallel around it",
    check=check,
)
