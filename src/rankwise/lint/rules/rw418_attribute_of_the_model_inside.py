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

**When it says nothing.** Attributes of DDP itself, FSDP (it forwards attributes), a model that is wrapped on one path
only, code that asks what it has (``hasattr``, ``isinstance``).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.calls import arms_of
from rankwise.lint.model.notes import WrapperRead
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import above

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

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
    seen: set[ast.AST] = set()
    for read in script.notes:
        if isinstance(read, WrapperRead) and read.module is script.module and read.node not in seen:
            seen.add(read.node)
            if _is_certain(script, read) and _only_inside(read.wrapper, read.node.attr):
                name = ast.unparse(read.node.value)
                yield script.finding(
                    RULE,
                    read.node,
                    f"`{name}` is a DistributedDataParallel, which has no `{read.node.attr}`, only the model inside has: AttributeError",
                    f"write `{name}.module.{read.node.attr}`",
                )


def _is_certain(script: Script, read: WrapperRead) -> bool:
    """Whether the read comes wherever the model was wrapped, and nothing asks whether there is such an attribute."""
    made = read.wrapper.call
    return (
        isinstance(read.node.ctx, ast.Load)
        and made is not None
        and made.name == DDP
        and arms_of(made.tests) <= arms_of(read.tests)
        and not any(
            isinstance(one, ast.Try) or (isinstance(one, (ast.If, ast.IfExp, ast.BoolOp)) and _asks_kind(one))
            for one in above(script.tree, read.node)
        )
    )


def _asks_kind(node: ast.If | ast.IfExp | ast.BoolOp) -> bool:
    text = ast.unparse(node if isinstance(node, ast.BoolOp) else node.test)
    return "isinstance" in text or "hasattr" in text or "type(" in text


def _only_inside(wrapper: Object, attr: str) -> bool:
    if attr in _OF_DDP or attr in _OF_MODULE or attr.startswith("_"):
        return False
    inner = wrapper.call.arg(0, "module") if wrapper.call is not None else None
    thing = inner.thing if inner is not None else None
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
