"""Split activations along the sequence where layers are whole (sequence parallelism; Korthikanti et al., arXiv:2205.05198).

Between the first and the last block of a stack, each rank holds its part of the sequence: norms, dropout and the residual
sum work on that. A module with split layers (attention, feed-forward) sees the whole sequence: its input is gathered, and
its output is summed and scattered at once. Before the first block and after the last everything is whole, so that
positions, masks, the head and the loss need not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rankwise.base.errors import UsageError
from rankwise.parallel.tensor_checks import is_projection
from rankwise.parallel.tensor_plans import Split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

#: Batch, sequence, features.
SEQUENCE_DIM = 1
#: What models call the argument that goes from block to block.
_INPUT_NAMES = ("hidden_states", "x", "input", "inputs", "src")
#: Norms that look at one token at a time.
_TOKEN_NORMS = ("LayerNorm", "RMSNorm")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Where activations are split along the sequence, and where they are whole.

    Attributes:
        stacks: Blocks in the order in which they run; the input of the first is split, the output of the last gathered.
        gathered: Modules inside blocks that need the whole sequence, by name.
        norms: Splits for the norms that the plan does not name.
        inside: Ids of the modules inside blocks.
        flat: Ids of split layers that stand in a block itself: each gathers its own input.
    """

    stacks: list[list[tuple[str, nn.Module]]] = field(default_factory=list)
    gathered: dict[str, nn.Module] = field(default_factory=dict)
    norms: list[Split] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    flat: set[int] = field(default_factory=set)


def plan_sequence(model: nn.Module, splits: Sequence[Split]) -> SequenceLayout:
    """Find the blocks of a model, and what in them can work on a part of the sequence.

    Raises:
        UsageError: Split layers outside of blocks, or parameters in a block of which it is not known whether they can
            work on a part of the sequence; names them.
    """
    layout = SequenceLayout()
    containers: dict[str, list[tuple[str, nn.Module]]] = {}
    for split in splits:
        if split.word != "colwise" or isinstance(split.module, nn.Embedding):
            continue
        container = _find_container(model, split.name, splits)
        if container is not None:
            containers.setdefault(container, _list_blocks(model, container, splits))
        elif split.style is None:  # one of torch's own says itself what it takes and gives: a head
            raise UsageError(
                f"sequence_parallel=True needs blocks in a ModuleList or Sequential, each with layers that are split 'colwise' and 'rowwise': {split.name!r} is in none",
                hint="without sequence_parallel the plan works as it is",
            )
    if not containers:
        raise UsageError("sequence_parallel=True needs split layers, and the plan has no 'colwise' nn.Linear")
    layout.stacks.extend(containers.values())
    for name, block in (block for blocks in layout.stacks for block in blocks):
        layout.inside.update(id(module) for module in block.modules())
        _plan_block(name, block, splits, layout)
    return layout


def _find_container(model: nn.Module, name: str, splits: Sequence[Split]) -> str | None:
    """Find the outermost list of blocks around a split layer, if it is in one: a block has layers split both ways."""
    parts = name.split(".")
    for length in range(len(parts)):
        container = ".".join(parts[:length])
        if isinstance(model.get_submodule(container), (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and _is_block(
            ".".join(parts[: length + 1]), splits
        ):
            return container
    return None


def _is_block(name: str, splits: Sequence[Split]) -> bool:
    inside = {split.word.partition("_")[0] for split in splits if split.name.startswith(f"{name}.")}
    return {"colwise", "rowwise"} <= inside


def _list_blocks(model: nn.Module, container: str, splits: Sequence[Split]) -> list[tuple[str, nn.Module]]:
    prefix = f"{container}." if container else ""
    children = [(prefix + own, child) for own, child in model.get_submodule(container).named_children()]
    places = [place for place, (name, _) in enumerate(children) if _is_block(name, splits)]
    return children[places[0] : places[-1] + 1]


def _plan_block(name: str, block: nn.Module, splits: Sequence[Split], layout: SequenceLayout) -> None:
    planned = {id(split.module): split for split in splits}
    here = [split for split in splits if split.name.startswith(f"{name}.")]
    for split in here:
        if split.word == "experts":
            raise UsageError(
                f"sequence_parallel=True: the experts {split.name!r} see all tokens",
                hint="leave sequence_parallel out",
            )
    gathers = [split for split in here if split.word.startswith("colwise") or split.word == "rowwise_split"]
    for split in gathers:
        if split.parent_name != name:
            if not any(split.name.startswith(f"{other}.") for other in layout.gathered):
                layout.gathered[split.parent_name] = block.get_submodule(split.parent_name[len(name) + 1 :])
        elif split.word == "colwise" and not is_projection(split.own_name):
            layout.flat.add(id(split.module))
        else:
            raise UsageError(
                f"sequence_parallel=True: {split.name!r} is in the block {name!r} itself, whose forward would see only a part of the sequence",
                hint="put attention into a module of its own inside the block, or leave sequence_parallel out",
            )
    whole = {id(module) for gathered in layout.gathered.values() for module in gathered.modules()}
    for own, module in block.named_modules():
        full = f"{name}.{own}" if own else name
        if id(module) in planned or not any(True for _ in module.parameters(recurse=False)):
            continue
        if id(module) in whole or not type(module).__name__.endswith(_TOKEN_NORMS):
            part = "the whole" if id(module) in whole else "a part of the"
            raise UsageError(
                f"sequence_parallel=True: {full!r} ({type(module).__name__}) has parameters, is not in the plan, and is in a place that sees {part} sequence",
                hint="give it 'sequence' in the plan if it treats each token by itself, 'replicate' if it sees the whole sequence; or leave sequence_parallel out",
            )
        layout.norms.append(Split(name=full, module=module, word="sequence", style=None, pattern=full))


def install_sequence(layout: SequenceLayout, mesh: DeviceMesh) -> None:
    """Put the hooks in place that split and gather."""
    for blocks in layout.stacks:
        name, first = blocks[0]
        first.register_forward_pre_hook(_bind(_change_input, _bind(_split, name, mesh)), with_kwargs=True)
        blocks[-1][1].register_forward_hook(_bind(_gather_output, mesh))
    for module in layout.gathered.values():
        module.register_forward_pre_hook(_bind(_change_input, _bind(_gather, mesh)), with_kwargs=True)


def _bind(function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """Return a partial function that a copy of the model shares, as a mesh can't be copied."""
    return lambda *given: function(*bound, *given)


def _change_input(change: Callable[[Tensor], Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    name = next((name for name in _INPUT_NAMES if isinstance(kwargs.get(name), Tensor)), None)
    if name is None:
        raise UsageError(
            f"sequence_parallel=True: {type(module).__name__} was called without a tensor as its first argument, nor as {' or '.join(_INPUT_NAMES)}",
            hint="pass the activations first",
        )
    return args, {**kwargs, name: change(kwargs[name])}


def _split(name: str, mesh: DeviceMesh, x: Tensor) -> Tensor:
    degree = mesh.size()
    if x.dim() != 3 or x.shape[SEQUENCE_DIM] % degree:
        raise UsageError(
            f"sequence_parallel=True: the input of {name!r} has the shape {tuple(x.shape)}; it must be (batch, sequence, features), with a sequence that {degree} ranks can share evenly",
            hint="pad the sequence to a multiple of the number of ranks",
        )
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    part: Tensor = whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local()
    return part


def _gather(mesh: DeviceMesh, x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    # Stays a DTensor: the gradients of all layers that read it are then summed and scattered once.
    whole: Tensor = x.redistribute(placements=[Replicate()])
    return whole


def _gather_output(mesh: DeviceMesh, module: nn.Module, _: Any, output: Any) -> Any:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise UsageError(
            f"sequence_parallel=True: {type(module).__name__} returned a {type(output).__name__}; a block must return its activations, alone or first in a tuple"
        )
    # No view: FSDP's hooks would be lost by an operator in place.
    whole = _gather(mesh, first).to_local().clone()
    return whole if first is output else type(output)([whole, *output[1:]])
