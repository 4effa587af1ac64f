"""What plan() tells before a run is what the run allocates: weights, gradients and states on two ranks, activations in a forward."""

from __future__ import annotations

import importlib.util
import sys
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import rankwise
from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.blocks import find_blocks
from rankwise.parallel.plan_trace import Work, trace_forward
from rankwise.parallel.planning import parse_size
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.parallel.plan_compose import Composition
    from rankwise.parallel.planning import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
#: What the brief figures of a plan may be off by: AdamW's counts of steps and the padding of uneven shards are counted, too.
WEIGHTS_TOLERANCE, ACTIVATIONS_TOLERANCE, WIDER = 0.05, 0.10, 1.03
BATCH, CONTEXT = 4, 32


def load_gpt() -> Any:
    """Import the example's model.py, which is in no package, beside its data.py."""
    if "gpt_example" not in sys.modules:
        sys.path.insert(0, str(EXAMPLE))
        try:
            spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE / "model.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["gpt_example"] = module
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(EXAMPLE))
    return sys.modules["gpt_example"]


def build_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt":
        gpt = load_gpt()
        return gpt.GPT(gpt.Size(layers=2, width=96, heads=4, context=CONTEXT, vocabulary=320))
    layers: list[nn.Module] = [
        nn.Linear(48, 130),
        nn.ReLU(),
        nn.Linear(130, 130),
        nn.ReLU(),
        nn.Linear(130, 10),
    ]
    return nn.Sequential(*layers, nn.BatchNorm1d(10))


def build_on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(kind)


def make_batch(kind: str) -> tuple[Tensor, Tensor]:
    if kind == "gpt":
        tokens_BS = torch.randint(256, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(1))
        return tokens_BS, tokens_BS.roll(-1, dims=1)
    return torch.randn(BATCH, 48), torch.randint(10, (BATCH,))


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def find(plan: Plan, name: str, *, precision: str = "fp32", checkpointing: bool = False) -> Composition:
    return next(
        one
        for one in plan.compositions
        if (one.name, one.precision, one.checkpointing) == (name, precision, checkpointing)
    )


def plan(kind: str, **more: Any) -> Plan:
    options = {"num_ranks": 2, "precision": "fp32", "batch": make_batch(kind), "loss": compute_loss} | more
    return rankwise.plan(build_on_meta(kind), **options)


# ------------------------------------------- weights, gradients and states


def list_local(tensors: Iterable[Any]) -> Iterator[Tensor]:
    for one in tensors:
        if isinstance(one, Tensor):
            yield one.to_local() if isinstance(one, DTensor) else one


def count_storages(tensors: Iterable[Any]) -> int:
    """Add up distinct storages: what is allocated, however it is looked at."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in list_local(tensors)}
    return sum(storages.values())


def count_numbers(tensors: Iterable[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in list_local(tensors))


def shard_states(model: nn.Module, factory: Any, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own module, about torch.jit
        from rankwise.parallel.zero import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), factory, **options)


def count_step(kind: str, way: str, optimizer_name: str) -> dict[str, int]:
    """Make one step, and return what this rank then holds, in bytes."""
    with rankwise.init(device="cpu"):
        model, batch = build_model(kind), make_batch(kind)
        factory = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}[optimizer_name]
        options: dict[str, Any] = {"lr": 1e-3} | ({"momentum": 0.9} if optimizer_name == "momentum" else {})
        wrapped: nn.Module = model
        if way == "FSDP":
            for one in model.blocks if kind == "gpt" else [part for part in model if isinstance(part, nn.Linear)]:
                fully_shard(one)
            fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer: Any = (
            shard_states(model, factory, options) if way == "ZeRO-1" else factory(model.parameters(), **options)
        )
        compute_loss(wrapped, batch).backward()
        optimizer.step()
        inner = optimizer.optim if way == "ZeRO-1" else optimizer
        states = [one for state in inner.state.values() for one in state.values()]
        # A bucket of DDP, or a scattered gradient, may hold several gradients in one storage: their own bytes are added up.
        return {
            "parameters": count_storages(model.parameters()), "gradients": count_numbers(one.grad for one in model.parameters()),
            "optimizer": count_storages(states), "buffers": count_storages(model.buffers()),
        }  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("way", ["DDP", "ZeRO-1", "FSDP"])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_two_ranks_hold_what_was_planned(kind: str, way: str, optimizer: str) -> None:
    """After one real step, the rank that holds most holds the planned parameters, gradients and states, each within 5 %."""
    told = find(plan(kind, optimizer=optimizer), way).memory
    real = run_ranks(count_step, 2, kind, way, optimizer)
    for name in ("parameters", "gradients", "optimizer", "buffers"):
        most = max(each[name] for each in real)
        assert getattr(told, name) == pytest.approx(most, rel=WEIGHTS_TOLERANCE), (name, real)


# ------------------------------------------------------------ activations


class Checkpointed(nn.Module):
    """A part that is computed again in backward."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)


def count_saved(kind: str, *, autocast: bool = False, checkpointing: bool = False) -> int:
    """Return the bytes that a real forward on the CPU leaves for backward, without the weights."""
    model, batch, held = build_model(kind), make_batch(kind), {}
    if checkpointing:
        for name, one in find_blocks(model).items():
            model.set_submodule(name, Checkpointed(one))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}

    def pack(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return one

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one),
        torch.autocast("cpu", enabled=autocast),
    ):
        loss = compute_loss(model, batch)
    held[loss.untyped_storage().data_ptr()] = 4
    return sum(size for address, size in held.items() if address not in own)


def trace(kind: str, dtype: torch.dtype = torch.float32, *, autocast: bool = False) -> Any:
    work = Work(batch=make_batch(kind), loss=compute_loss, micro_batch=None)
    model = build_on_meta(kind)
    return trace_forward(model, find_blocks(model), dtype, work, autocast=autocast).summarize()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_a_forward_saves_what_was_planned(kind: str, autocast: bool) -> None:
    """What autograd saves in a real forward is what was told without one, within 10 %."""
    told = trace(kind, autocast=autocast).saved()
    assert told == pytest.approx(count_saved(kind, autocast=autocast), rel=ACTIVATIONS_TOLERANCE)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_checkpoints_leave_what_was_planned(kind: str) -> None:
    """With each block under torch's checkpoint, a real forward keeps what was told: block inputs, and what is outside; within 10 %."""
    told = trace(kind)
    real = count_saved(kind, checkpointing=True)
    assert told.outside + told.outside_split + told.inputs == pytest.approx(real, rel=ACTIVATIONS_TOLERANCE)
    assert told.saved(checkpointing=True) >= real
    # Each block of the MLP is a Linear, which saves its input and nothing else: there is nothing to gain.
    assert (real < count_saved(kind)) == (kind == "gpt")


def test_activations_grow_with_the_micro_batch() -> None:
    """Four times the samples need four times the activations, and not one byte more of weights."""
    few, many = (find(plan("gpt", micro_batch=count), "DDP").memory for count in (2, 8))
    assert few.activations is not None
    assert many.activations == pytest.approx(4 * few.activations, rel=0.01)
    assert (many.parameters, many.optimizer) == (few.parameters, few.optimizer)


# ------------------------------------------------------------------- peaks


class Peak(TorchDispatchMode):
    """The most bytes that storages held at once; FSDP frees and fills them in place, so all are looked at after each operation."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.most = 0
        self.look(tensors)

    def look(self, tensors: Iterable[Any]) -> None:
        for one in list_local(tensors):
            storage = one.untyped_storage()
            if storage._cdata not in self.storages:
                self.storages[storage._cdata] = weakref.ref(storage)
                weakref.finalize(storage, self.storages.pop, storage._cdata)
        living = [found for one in list(self.storages.values()) if (found := one()) is not None]
        self.most = max(self.most, sum(one.nbytes() for one in living))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(tree_leaves((args, kwargs, result)))
        return result


def measure_peak(way: str, checkpointing: bool) -> int:
    """Return the most bytes that a rank holds in its second step, in which the optimizer has its states."""
    with rankwise.init(device="cpu"):
        model, batch = build_model("gpt"), make_batch("gpt")
        blocks = find_blocks(model)
        if checkpointing:
            for name, one in blocks.items():
                model.set_submodule(name, Checkpointed(one))
        if way == "FSDP":
            for one in model.blocks:
                fully_shard(one)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            states = [one for state in optimizer.state.values() for one in state.values()]
            with Peak([*model.parameters(), *states]) as peak:
                compute_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return peak.most


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("way", ["DDP", "FSDP"])
def test_the_total_is_an_upper_bound_and_no_fantasy(way: str, checkpointing: bool) -> None:
    """A real step never holds more than the total, and not less than two thirds of it: gradients come as activations go."""
    told = find(plan("gpt"), way, checkpointing=checkpointing).memory.total
    real = max(run_ranks(measure_peak, 2, way, checkpointing))
    assert told / 1.5 < real <= told


# --------------------------------------------------- pipelines and placement


class Chain(nn.Module):
    """Eight blocks, an embedding before them and a head behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(8)
        )
        self.head = nn.Linear(64, 320)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measure_stage(schedule: str, microbatches: int) -> dict[str, int]:
    """Return what a stage's rank holds after a step, and the most that it held in its second one."""
    tokens, targets = make_batch("gpt")
    batch = (tokens.repeat(microbatches, 1), targets.repeat(microbatches, 1))
    with rankwise.init(device="cpu") as ctx:
        ctx.mesh(pipeline=-1)
        pipe = rankwise.apply_pipeline(Chain(), schedule=schedule, microbatches=microbatches, loss=compute_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
        for _ in range(2):
            states = [one for state in optimizer.state.values() for one in state.values()]
            with Peak([*pipe.parameters(), *states]) as peak:
                pipe.step(batch)
                optimizer.step()
            held = {
                "parameters": count_storages(pipe.parameters()),
                "gradients": count_numbers(one.grad for one in pipe.parameters()),
                "optimizer": count_storages(one for state in optimizer.state.values() for one in state.values()),
                "peak": peak.most,
            }
            optimizer.zero_grad()
        return held


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("1f1b", 4), ("gpipe", 4)])
def test_each_stage_holds_what_was_planned(schedule: str, num_ranks: int) -> None:
    """Every stage's weights, gradients and states within 5 %; a real step holds the stage's total at most, and two thirds of it at least."""
    microbatches = 2 * num_ranks
    with torch.device("meta"):
        model = Chain()
    told = rankwise.plan(
        model, num_ranks=num_ranks, precision="fp32", batch=make_batch("gpt"), loss=compute_loss, schedule=schedule,
    )  # fmt: skip
    one = find(told, f"PP {num_ranks} ({schedule}, {microbatches} micro-batches)")
    real = run_ranks(measure_stage, num_ranks, schedule, microbatches)
    for number, (part, held) in enumerate(zip(one.parts, real, strict=True)):
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(part, name) == pytest.approx(held[name], rel=WEIGHTS_TOLERANCE), (name, real)
        # The batch itself and what an operation needs on the side are not counted: 2 % of a model as small as this one.
        assert part.total / 1.5 < held["peak"] <= part.total * WIDER, (number, real)


def test_pipelines_and_placement_are_counted_by_their_rules() -> None:
    """1F1B keeps p - stage micro-batches, GPipe all; beside copies the same, beside FSDP a part; devices of one process hold all of it once."""
    with torch.device("meta"):
        model = Chain()
    work: dict[str, Any] = {"precision": "fp32", "batch": make_batch("gpt"), "loss": compute_loss}
    told = rankwise.plan(model, num_ranks=4, **work)
    first, second, third, _ = find(told, "PP 4 (1f1b, 8 micro-batches)").parts
    assert first.activations is not None
    assert second.activations is not None
    assert third.activations is not None
    one = second.activations - third.activations  # a micro-batch more
    eager = find(rankwise.plan(model, num_ranks=4, schedule="gpipe", **work), "PP 4 (gpipe, 8 micro-batches)")
    assert eager.parts[1].activations == second.activations + 5 * one
    copies, shards = (find(told, f"PP 2 x {name} 2 (1f1b, 4 micro-batches)") for name in ("DDP", "FSDP"))
    assert copies.memory.parameters == pytest.approx(2 * shards.memory.parameters, rel=0.01)
    placed = find(told, "one process, placed over 4")
    everything = find(told, "DDP").memory
    assert sum(part.parameters for part in placed.parts) == everything.parameters
    assert sum(part.optimizer for part in placed.parts) == pytest.approx(everything.optimizer, rel=0.001)
    shown = told.as_json()["compositions"][told.compositions.index(placed)]
    assert [part["total"] for part in shown["parts"]] == [part.total for part in placed.parts]
    saves = [str(one) for one in told.compositions if one.checkpointing and one.pipeline > 1]
    assert "PP 4 (1f1b, 8 micro-batches) + checkpointing" in saves


def test_what_stands_between_blocks_is_planned_where_it_is_computed() -> None:
    """A layer between two blocks belongs to the stage of the first of them, as ``apply_pipeline`` cuts; tied weights to each of theirs."""
    model = nn.Module()
    model.down = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    model.middle = nn.Linear(8, 8, bias=False)
    model.up = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    one = find(rankwise.plan(model, num_ranks=2, precision="fp32"), "PP 2 (1f1b, 4 micro-batches)")
    assert [part.parameters // (8 * 8 * 4) for part in one.parts] == [3, 2]
    model.up[1].weight = model.down[0].weight
    one = find(rankwise.plan(model, num_ranks=2, precision="fp32"), "PP 2 (1f1b, 4 micro-batches)")
    assert [part.parameters // (8 * 8 * 4) for part in one.parts] == [3, 2]


def test_a_pipeline_is_proposed_with_what_it_lets_ranks_wait() -> None:
    """Where a stage fits and no other way does; the sentence says how much of a step is spent waiting. Wrong words are errors."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    everything = rankwise.plan(model, num_ranks=4, memory=None, precision="fp32", optimizer="sgd")
    pipeline = next(one for one in everything.compositions if one.pipeline == 4)
    assert pipeline.memory.total < min(
        one.memory.total for one in everything.compositions if one.pipeline == one.devices == 1
    )
    told = rankwise.plan(model, num_ranks=4, memory=pipeline.memory.total, reserve=0, precision="fp32", optimizer="sgd")
    assert told.proposal is not None
    assert told.proposal.pipeline == 4
    assert "each rank waits 27% of a step" in told.why
    with pytest.raises(UsageError, match="schedule='zbv' can't be planned"):
        rankwise.plan(model, num_ranks=4, schedule="zbv")
    with pytest.raises(UsageError, match="microbatches=0 is below 1"):
        rankwise.plan(model, num_ranks=4, microbatches=0)
    assert not any(one.pipeline > 1 for one in rankwise.plan(model, num_ranks=4, microbatches=1).compositions)


# --------------------------------------------------------- what is counted


def test_nothing_is_allocated() -> None:
    """A model of 3.4e12 numbers, 13.7 TB, is planned here: whoever allocates one layer of it, 69 GB, dies."""
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(131072, 131072, bias=False) for _ in range(200)))
    told = rankwise.plan(huge, num_ranks=1024, precision="fp32", batch=torch.empty(1, 131072))
    assert told.num_parameters == 200 * 131072**2
    assert find(told, "FSDP").memory.parameters == 200 * 131072**2 * 4 // 1024


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("AdamW", 2), ("rmsprop", 1)])  # fmt: skip
def test_states_are_those_of_the_optimizer(optimizer: str, copies: int) -> None:
    """SGD keeps nothing, momentum a copy of the weights, Adam two, whatever the letters' case; steps are a few bytes more."""
    memory = find(plan("gpt", optimizer=optimizer), "DDP").memory
    assert memory.optimizer == pytest.approx(copies * memory.parameters, rel=0.001)


def test_states_of_ones_own_optimizer_are_measured() -> None:
    """A function that makes an optimizer is asked by one step: AMSGrad keeps three copies; Adafactor rows and columns."""
    amsgrad = find(plan("mlp", optimizer=lambda given: torch.optim.AdamW(given, amsgrad=True)), "DDP").memory
    assert amsgrad.optimizer == pytest.approx(3 * amsgrad.parameters, rel=0.01)
    model = nn.Linear(48, 130)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(2, 48)).sum().backward()
    optimizer.step()
    real = sum(one.numel() * 4 for state in optimizer.state.values() for one in state.values())
    told = rankwise.plan(model, num_ranks=1, optimizer="adafactor", precision="fp32")
    assert told.compositions[0].memory.optimizer == real


def test_frozen_weights_have_no_gradients_and_no_states() -> None:
    """Half of two equal layers, frozen, halves gradients and states, and leaves the weights."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    memory = rankwise.plan(model, num_ranks=1, precision="fp32", optimizer="momentum").compositions[0].memory
    assert memory.gradients == memory.optimizer == memory.parameters // 2


def test_the_model_is_left_as_it_was() -> None:
    """A real model can be planned, too: its values, devices and hooks are those of before."""
    model = build_model("gpt")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    rankwise.plan(model, num_ranks=2, batch=make_batch("gpt"), loss=compute_loss)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_precisions_differ_as_the_bytes_of_their_numbers() -> None:
    """Under autocast weights stay fp32, and activations hold bf16 copies of them; all in bf16 is half of all in fp32."""
    wide, mixed, narrow = (find(plan("gpt", precision=one), "DDP", precision=one).memory for one in ("fp32", "bf16", "bf16-params"))  # fmt: skip
    assert wide.parameters == mixed.parameters == 2 * narrow.parameters
    assert wide.optimizer == pytest.approx(2 * narrow.optimizer, rel=0.001)
    assert wide.activations is not None
    assert narrow.activations is not None
    assert narrow.activations == pytest.approx(wide.activations / 2, rel=0.1)
    sharded = find(plan("gpt", precision="bf16"), "FSDP", precision="bf16").memory
    assert sharded.parameters == pytest.approx(wide.parameters / 2, rel=0.01)
    assert sharded.activations is not None
    assert mixed.activations is not None
    assert sharded.activations < mixed.activations


def test_tensor_parallelism_splits_pairs_of_linear_layers() -> None:
    """Of a block, attention and MLP are halved by two ranks; tables and norms stay whole, and so do the inputs of pairs."""
    told = plan("gpt", precision="fp32")
    whole, halved = find(told, "DDP").memory, find(told, "TP 2").memory
    in_pairs = 2 * (3 * 96 * 96 + 96 * 96 + 2 * 4 * 96 * 96) * 4
    assert whole.parameters - halved.parameters == in_pairs // 2
    assert whole.activations is not None
    assert halved.activations is not None
    assert whole.activations / 2 < halved.activations < whole.activations


def test_a_mixture_of_experts_is_planned_as_if_each_expert_got_as_many_tokens() -> None:
    """What its forward saves is told within 10 %, although it looks at values, and tensor parallelism shares out the experts."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.MixtralConfig(**sizes, vocab_size=128, num_local_experts=4)
    model, tokens = transformers.MixtralForCausalLM(config), torch.randint(128, (4, 32))
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    held: dict[int, Any] = {}

    def pack(one: Tensor) -> Tensor:
        held[one.untyped_storage().data_ptr()] = one.untyped_storage()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        model(input_ids=tokens, labels=tokens)
    work = Work(batch=tokens, loss=lambda model, batch: model(input_ids=batch, labels=batch).loss, micro_batch=None)
    traced = trace_forward(model, find_blocks(model), torch.float32, work, autocast=False)
    real = sum(one.nbytes() for address, one in held.items() if address not in own)
    assert traced.summarize().saved() == pytest.approx(real, rel=ACTIVATIONS_TOLERANCE)
    experts = [name for name in traced.split if "experts" in name]
    assert len(experts) == 4
    assert {traced.split[name] for name in experts} == {0}


def test_the_root_of_fsdp_stays_gathered() -> None:
    """Gathered are: root with its gradients, two blocks, and a block's gradients twice, before they are scattered."""
    root, block = (320 + CONTEXT + 1) * 96 * 4, (12 * 96 * 96 + 2 * 96) * 4
    assert find(plan("gpt"), "FSDP").memory.communication == 2 * root + 2 * block + 2 * block
    alone = rankwise.plan(nn.Linear(64, 64, bias=False), num_ranks=2, precision="fp32")
    assert find(alone, "FSDP").memory.communication == 3 * 64 * 64 * 4


# ------------------------------------------------------------ the proposal


def test_the_cheapest_that_fits_is_proposed() -> None:
    """As memory gets scarcer, proposals go from DDP over ZeRO-1 and FSDP to checkpoints and TP; nothing cheaper fits then."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(32)]
        model = nn.Sequential(*blocks)
    batch = torch.empty(2048, 256)
    everything = rankwise.plan(model, num_ranks=4, memory=None, precision="fp32", batch=batch)
    totals = {str(one): one.memory.total for one in everything.compositions}
    shown = ["DDP", "ZeRO-1", "FSDP", "FSDP + checkpointing", "TP 2 x FSDP 2 + checkpointing"]
    assert everything.proposal is None
    assert [totals[name] for name in shown] == sorted((totals[name] for name in shown), reverse=True)
    for name in shown:
        told = rankwise.plan(model, num_ranks=4, memory=totals[name], reserve=0, precision="fp32", batch=batch)
        assert str(told.proposal) == name
        before = told.compositions[: [str(one) for one in told.compositions].index(name)]
        assert all(one.memory.total > totals[name] and not one.fits for one in before)
        assert ("nothing communicates less" if name == "DDP" else "needs") in told.why


def test_where_nothing_fits_the_ranks_needed_are_told() -> None:
    """With so many ranks something fits in which no rank waits for others, and with one node less nothing does but a pipeline."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(64)))
    options: dict[str, Any] = {"memory": "400MB", "reserve": 0, "precision": "fp32", "ranks_per_node": 4}
    told = rankwise.plan(model, num_ranks=2, **options)
    assert told.proposal is None
    assert told.ranks_needed is not None
    assert told.ranks_needed % 4 == 0
    assert (
        f"{told.ranks_needed} ranks would do, with HSDP" in told.why
        or f"{told.ranks_needed} ranks would do, with FSDP" in told.why
    )
    assert rankwise.plan(model, num_ranks=told.ranks_needed, **options).proposal is not None
    fewer = rankwise.plan(model, num_ranks=told.ranks_needed - 4, **options).proposal
    assert fewer is None or fewer.pipeline > 1


def test_where_more_ranks_do_not_help_that_is_said() -> None:
    """Activations are held by each rank: no number of them makes room, and a smaller micro-batch would."""
    told = plan("gpt", memory="1MB", reserve=0, micro_batch=512)
    assert (told.proposal, told.ranks_needed) == (None, None)
    assert "more ranks don't help" in told.why
    assert "smaller micro-batch" in told.why


def test_without_a_batch_activations_are_unknown_and_said_to_be() -> None:
    """No number stands where none is known, and no checkpoints are proposed."""
    told = plan("gpt", batch=None, loss=None)
    assert all(one.memory.activations is None and not one.checkpointing for one in told.compositions)
    assert "activations are not counted" in told.notes[0]


def test_what_is_not_looked_at_is_said() -> None:
    """A model without blocks, or without pairs of Linear layers, is planned without checkpoints and TP, and that is told."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    told = rankwise.plan(model, num_ranks=2, batch=torch.empty(1, 1, 8, 8))
    assert not any(one.checkpointing or one.tensor > 1 for one in told.compositions)
    assert [note.partition(" were found")[0] for note in told.notes] == [
        "no pairs of nn.Linear layers",
        "no repeated blocks",
    ]
    assert all(note in str(told) for note in told.notes)


def test_weights_in_bf16_are_the_last_resort() -> None:
    """Where fp32 weights fit in no way, bf16 ones are proposed, with what they cost; a bf16 model has no fp32 weights at all."""
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    told = rankwise.plan(model, num_ranks=1, memory="200MB", reserve=0)
    assert told.proposal is not None
    assert told.proposal.precision == "bf16-params"
    assert "small updates" in told.why
    assert {one.precision for one in rankwise.plan(model.bfloat16(), num_ranks=1).compositions} == {"bf16-params"}


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("1.5g", 3 * 2**29),
        ("512MB", 2**29),
        (4096, 4096),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_as_makers_of_gpus_write_them(text: str | int, size: int) -> None:
    """GB is 2**30 bytes: a GPU of 80 GB has 79.6 GiB or more, not 74.5."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"num_ranks": 0}, UsageError, "num_ranks=0 is below 1"),
        ({"memory": "lots"}, UsageError, "'lots' is not a size"),
        ({"memory": "1GB", "reserve": "2GB"}, UsageError, "leaves nothing"),
        ({"optimizer": "adamx"}, UsageError, "no optimizer 'adamx'.*adamw"),
        ({"precision": "int8"}, UsageError, "no precision 'int8'"),
        ({"loss": None}, ModelError, "forward pass can't be followed"),
    ],
    ids=["ranks", "memory", "reserve", "optimizer", "precision", "batch"],
)
def test_what_cannot_be_planned_is_an_error(more: dict[str, Any], error: type[Exception], words: str) -> None:
    """A wrong word or number, or a batch that the model does not take, is told with its value."""
    with pytest.raises(error, match=words):
        plan("gpt", **more)


def test_lazy_layers_and_empty_models_are_refused() -> None:
    """What has no shapes, or no parameters, can't be counted."""
    with pytest.raises(ModelError, match=r"'0\.weight' has no shape yet"):
        rankwise.plan(nn.Sequential(nn.LazyLinear(3)), num_ranks=1)
    with pytest.raises(ModelError, match="no parameters"):
        rankwise.plan(nn.ReLU(), num_ranks=1)


def test_a_model_that_looks_at_values_is_refused_with_its_reason() -> None:
    """A forward that branches on a value can't be followed without values; without a batch its weights can be counted."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(ModelError, match="without values: DataDependentOutputException"):
        rankwise.plan(Gated(), num_ranks=1, batch=torch.ones(2, 4))
    assert rankwise.plan(Gated(), num_ranks=1).num_parameters == 20
