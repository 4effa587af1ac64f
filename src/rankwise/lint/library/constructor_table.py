"""Library calls that make an object the rules follow, and calls whose results are known for what they are."""

from __future__ import annotations

from rankwise.lint.library.names import CONTEXT, DDP, ENGINE, FSDP, GROUP

#: Wrapped models: calling them is a forward pass that ranks make together, or may.
WRAPPERS = frozenset({DDP, FSDP, ENGINE})
#: Callables that go on with fewer items of what they are given, or more.
RECOUNTS = frozenset(
    {"itertools.islice", "itertools.chain", "itertools.cycle", "accelerate.data_loader.skip_first_batches"}
)
#: Callables whose first argument goes on as it is, perhaps elsewhere or in another form.
PASS_ON = RECOUNTS | {
    *("torch.compile", "torch.jit.script", "peft.get_peft_model"),
    *("builtins.iter", "typing.cast", "tqdm.tqdm", "rich.progress.track", "builtins.list", "builtins.tuple"),
    *("torch.nn.parameter.Parameter", "contextlib.nullcontext", "functools.lru_cache", "functools.cache"),
}
TENSOR = "torch.Tensor"
#: Functions that make a tensor of the values they are given, on the CPU unless they get a device.
OF_VALUES = frozenset(
    f"torch.{name}"
    for name in (
        "tensor",
        "as_tensor",
        "from_numpy",
        "Tensor",
        "FloatTensor",
        "LongTensor",
        "IntTensor",
        "DoubleTensor",
        "HalfTensor",
        "BoolTensor",
        "ByteTensor",
    )
)
FACTORIES = OF_VALUES | {f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "arange", "eye", "linspace")}
#: Those that draw its values.
DRAWN = frozenset(f"torch.{name}" for name in ("rand", "randn", "randint", "normal", "randperm", "bernoulli"))
#: Functions that seed all generators at once.
SEEDS_ALL = frozenset(
    """accelerate.utils.set_seed transformers.set_seed transformers.trainer_utils.set_seed lightning.seed_everything
    lightning.pytorch.seed_everything lightning.fabric.seed_everything""".split()  # noqa: SIM905
)
#: Methods that give their object back.
RETURNS_SELF = frozenset({"to", "cuda", "cpu", "float", "half", "bfloat16", "double", "train", "eval", "requires_grad_",
                          "to_empty", "share_memory", "share_memory_", "contiguous", "parse_args", "xpu", "npu", "type", "apply",
                          "resolve", "expanduser", "absolute", "__iter__"})  # fmt: skip
#: Modules of torch's that keep buffers which DDP sends to all at a forward pass.
BUFFERED = frozenset(
    {
        *(f"torch.nn.BatchNorm{n}d" for n in (1, 2, 3)),
        "torch.nn.SyncBatchNorm",
        *(f"torch.nn.LazyBatchNorm{n}d" for n in (1, 2, 3)),
    }
)
#: Other names for a kind, made by a call of the first name.
MADE_KINDS = {"deepspeed.initialize": ENGINE, "rankwise.init": CONTEXT, "torch.distributed.new_group": GROUP,
              "torch.distributed.init_device_mesh": "torch.distributed.DeviceMesh",
              "torch.distributed.device_mesh.init_device_mesh": "torch.distributed.DeviceMesh"}  # fmt: skip
