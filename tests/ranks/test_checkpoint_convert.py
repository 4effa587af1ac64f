"""Weights go out of checkpoints as safetensors, and come in from files of other trainers, sharded or not, bit for bit."""

from __future__ import annotations

import errno
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankwise
from faulty_disks import FaultyDisk, fail
from rankwise import CheckpointError, checkpoint
from rankwise.checkpoint import convert, plan
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

load_file: Any = pytest.importorskip("safetensors.torch").load_file
save_file: Any = pytest.importorskip("safetensors.torch").save_file


def build_model(seed: int = 0) -> nn.Module:
    """Sizes that no number of ranks divides, buffers, and two dtypes."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.bfloat16))
    model[1].running_mean.normal_()
    return model


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Tied(nn.Module):
    """Two names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


# ------------------------------------------------------------------- export


@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_of_all_ranks_become_one_file(world_size: int, tmp_path: Path) -> None:
    """What FSDP2 had spread over the ranks is in the file whole, under the model's own names, in its own dtypes."""

    def program(folder: Path) -> None:
        with rankwise.init(device="cpu"):
            model = build_model()
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
            checkpoint.save(folder, {"model": model}, step=1)

    run_ranks(program, world_size, tmp_path)
    file = checkpoint.export_safetensors(tmp_path, tmp_path / "model.safetensors")
    assert_same(load_file(file), build_model().state_dict())
    assert [path.name for path in tmp_path.glob(".model*")] == []


def test_rows_that_several_ranks_wrote_are_joined(tmp_path: Path) -> None:
    """A large tensor that all ranks have is written by each in part, and is whole again in the file."""

    def program(folder: Path) -> None:
        plan._LARGE_BYTES = 64
        with rankwise.init(device="cpu"):
            model = torch.nn.Linear(7, 100, bias=False)
            model.weight.data.copy_(torch.arange(700).view(100, 7))
            checkpoint.save(folder, {"model": rankwise.apply_ddp(model)}, step=1)

    run_ranks(program, 2, tmp_path)
    _, index = convert.read_contents(convert.find_checkpoint(tmp_path))
    assert len({chunk.file for chunk in index.tensors["model.weight"].chunks}) == 2
    file = checkpoint.export_safetensors(tmp_path, tmp_path / "o.safetensors")
    assert_same(load_file(file), {"weight": torch.arange(700.0).view(100, 7)})


def test_every_dtype_and_odd_shape_is_kept(tmp_path: Path) -> None:
    """Scalars, empty tensors and all dtypes that safetensors has arrive as they were, whatever their order."""
    names = ("bool", "uint8", "int16", "float8_e4m3fn", "bfloat16", "float16", "int32", "float32", "int64", "float64", "complex64")  # fmt: skip
    state = {name: torch.ones(3, dtype=getattr(torch, name)) for name in names}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "deep": {"er": torch.eye(2)}}
    checkpoint.save(tmp_path, {"values": state}, step=1)
    found = load_file(checkpoint.export_safetensors(tmp_path, tmp_path / "v", part="values"))
    deeper = state.pop("deep")["er"]  # type: ignore[index]
    bits = {name: (value.float() if "float8" in name else value) for name, value in found.items()}
    assert found["float8_e4m3fn"].dtype is torch.float8_e4m3fn
    assert_same(bits, {**state, "float8_e4m3fn": torch.ones(3), "deep.er": deeper})


def test_a_dtype_that_safetensors_has_not_is_refused(tmp_path: Path) -> None:
    """It would lie there as bytes, and whoever loads it would not know: an error, and no file."""
    checkpoint.save(tmp_path, {"model": {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)}}, step=1)  # fmt: skip
    with pytest.raises(CheckpointError, match="b is complex128, which safetensors does not support"):
        checkpoint.export_safetensors(tmp_path, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_wrappers_words_go_and_own_names_stay(tmp_path: Path) -> None:
    """A state dict that was taken from DDP loses `module.`; a model's own child of that name keeps it."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    checkpoint.save(tmp_path, {"model": model, "by hand": model.state_dict()}, step=1)
    whole = load_file(checkpoint.export_safetensors(tmp_path, tmp_path / "a"))
    bare = load_file(checkpoint.export_safetensors(tmp_path, tmp_path / "b", part="by hand"))
    assert whole.keys() == {"module.weight", "module.bias"}
    assert bare.keys() == {"weight", "bias"}


def test_what_is_no_tensor_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers and texts have no place in the file: a line names them."""
    checkpoint.save(tmp_path, {"model": {"w": torch.ones(2), "version": 3, "who": "me"}}, step=1)
    file = checkpoint.export_safetensors(tmp_path, tmp_path / "o")
    assert_same(load_file(file), {"w": torch.ones(2)})
    assert capfd.readouterr().err.endswith(f"left out of {file}, as they are not tensors: version, who\n")


def test_damage_is_never_exported(tmp_path: Path) -> None:
    """A changed bit is found on the way; the file that was there before stays, and nothing else."""
    checkpoint.save(tmp_path / "run", {"model": build_model()}, step=1, rng=False)
    shard = next((tmp_path / "run" / "step-1").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "o").write_text("old")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.export_safetensors(tmp_path / "run", tmp_path / "o")
    assert (tmp_path / "o").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "run"]


@pytest.mark.parametrize("operation", ["write", "sync", "sync_folder"])
def test_a_full_disk_is_told(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk refuses, the error names file and cause, and nothing half written stays."""
    checkpoint.save(tmp_path / "run", {"model": build_model()}, step=1)
    monkeypatch.setattr(convert, "REAL_DISK", FaultyDisk(1, fail(errno.ENOSPC), only=(operation,)))
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.export_safetensors(tmp_path / "run", tmp_path / "o")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, the one before it is gone: a model need not fit into memory to be exported."""
    checkpoint.save(tmp_path, {"model": {name: torch.ones(10) for name in "abcde"}}, step=1)
    read_tensors, read = convert.read_tensors, list[weakref.ref[torch.Tensor]]()

    def watch(*args: Any) -> Any:
        assert not any(one() is not None for one in read)
        found = read_tensors(*args)
        read.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    monkeypatch.setattr(convert, "read_tensors", watch)
    checkpoint.export_safetensors(tmp_path, tmp_path / "o")
    assert len(read) == 5


# ------------------------------------------------------------ import: files


def wrap_names(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        (None, ""), (None, "module."), (None, "_orig_mod."), ("model", "module."), ("state_dict", "module._orig_mod."),
        ("model_state_dict", "_orig_mod.module."), ("net", ""), ("module", "module."), ("ema", ""), ("mine", "module."),
    ],
)  # fmt: skip
def test_weights_are_found_in_the_usual_files(prefix: str, key: str | None, tmp_path: Path) -> None:
    """Alone or beside an optimizer, a scheduler, an epoch and generators; with the names of wrappers or without."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    weights = wrap_names(model.state_dict(), prefix)
    whole = {"optimizer": optimizer.state_dict(), "epoch": 3, "best": 0.5, "args": {"lr": 0.1, "tags": ["a"]}}
    torch.save(weights if key is None else {key: weights, **whole}, tmp_path / "w.pt")
    other = build_model(seed=1)
    assert checkpoint.import_weights(tmp_path / "w.pt", other) == []
    assert_same(other.state_dict(), model.state_dict())


def test_an_optimizers_tensors_are_no_weights(tmp_path: Path) -> None:
    """Moments and a generator's state are dicts of tensors too, and never taken for the model."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    by_name = {"state": {"weight": optimizer.state[model.weight]}}
    torch.save({"optim": optimizer.state_dict(), "optim_by_name": by_name, "rng": {"cpu": torch.get_rng_state()}, "model": model.state_dict()}, tmp_path / "w.pt")  # fmt: skip
    other = nn.Linear(2, 2)
    assert checkpoint.import_weights(tmp_path / "w.pt", other) == []
    assert_same(other.state_dict(), model.state_dict())


def test_several_sets_of_weights_must_be_chosen_from(tmp_path: Path) -> None:
    """Model and moving average, or two networks: the error lists what there is, and key= takes one."""
    first, second = build_model(1).state_dict(), build_model(2).state_dict()
    torch.save({"model": first, "ema": second}, tmp_path / "a.pt")
    torch.save({"nets": {"generator": first, "discriminator": second}}, tmp_path / "b.pt")
    model = build_model()
    with pytest.raises(CheckpointError, match=r"several sets of weights: model \(9 tensors\), ema \(9 tensors\)"):
        checkpoint.import_weights(tmp_path / "a.pt", model)
    checkpoint.import_weights(tmp_path / "a.pt", model, key="ema")
    assert_same(model.state_dict(), second)
    with pytest.raises(CheckpointError, match=r"nets.generator \(9 tensors\), nets.discriminator"):
        checkpoint.import_weights(tmp_path / "b.pt", model)
    checkpoint.import_weights(tmp_path / "b.pt", model, key="nets.generator")
    assert_same(model.state_dict(), first)
    with pytest.raises(CheckpointError, match=r"no weights under 'generator'; it has nets.generator"):
        checkpoint.import_weights(tmp_path / "b.pt", model, key="generator")


def test_the_format_before_zip_is_read(tmp_path: Path) -> None:
    """Files of torch before 1.6 can't be mapped into memory, and are read."""
    model, other = build_model(), build_model(1)
    torch.save(model.state_dict(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert checkpoint.import_weights(tmp_path / "w.pth", other) == []
    assert_same(other.state_dict(), model.state_dict())


def test_safetensors_of_the_library_are_read(tmp_path: Path) -> None:
    """Other programs' safetensors files need neither their library nor ours: every dtype, empty tensors, any order."""
    model, other = build_model(), build_model(1)
    save_file(model.state_dict(), tmp_path / "w.safetensors", metadata={"format": "pt"})
    assert checkpoint.import_weights(tmp_path / "w.safetensors", other) == []
    assert_same(other.state_dict(), model.state_dict())


def test_what_needs_code_is_refused(tmp_path: Path) -> None:
    """A pickled module would run its class's code: refused with its name and the way out, and nothing is run."""
    torch.save({"model": build_model(), "epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"execute code in it: .*GLOBAL torch.nn.modules") as error:
        checkpoint.import_weights(tmp_path / "w.pt", build_model())
    assert "torch.save(model.state_dict()" in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.pt", b"", "can't be read by torch.load"),
        ("w.pt", b"PK\3\4 and nothing more", "can't be read by torch.load"),
        ("w.safetensors", b"", "not a safetensors file: it has 0 bytes"),
        ("w.safetensors", b"\xff" * 8, "not a safetensors file"),
        ("w.safetensors", b"\2" + b"\0" * 7 + b"[]", "is damaged"),
        ("w.safetensors", b"\2" + b"\0" * 7 + b"{}", "holds no weights: it is an empty dict"),
    ],
)
def test_files_that_are_none(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    """Cut off or something else: one error with the file's name."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as error:
        checkpoint.import_weights(tmp_path / name, build_model())
    assert name in error.value.message


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    """A download that stopped: of torch.save's and of safetensors alike."""
    torch.save(build_model().state_dict(), tmp_path / "w.pt")
    save_file(build_model().state_dict(), tmp_path / "w.safetensors")
    for path in list(tmp_path.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - 20])
        with pytest.raises(CheckpointError, match=path.name):
            checkpoint.import_weights(path, build_model())


def test_a_file_without_weights(tmp_path: Path) -> None:
    """What there is instead is told."""
    torch.save({"epoch": 3, "losses": [0.5]}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"no weights: it is epoch \(int\), losses \(list\)"):
        checkpoint.import_weights(tmp_path / "w.pt", build_model())


# ----------------------------------------------------------- import: models


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    """Strict: one error tells all that does not fit, and the model is untouched. Not strict: the same as lines, and the rest is loaded."""
    weights = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)).state_dict()
    weights["2.extra"] = torch.ones(1)
    torch.save(weights, tmp_path / "w.pt")
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = [
        "the file lacks 2.weight, 2.bias",
        "the model lacks 2.extra",
        "1.weight has shape [3, 7] in the model and [4, 7] in the file",
        "1.bias has shape [3] in the model and [4] in the file",
    ]
    with pytest.raises(CheckpointError) as error:
        checkpoint.import_weights(tmp_path / "w.pt", model)
    assert error.value.message == f"{tmp_path / 'w.pt'} does not fit the model: {'; '.join(told)}"
    assert_same(model.state_dict(), before)
    assert checkpoint.import_weights(tmp_path / "w.pt", model, strict=False) == told
    after = model.state_dict()
    assert torch.equal(after["0.weight"], weights["0.weight"])
    assert torch.equal(after["1.weight"], before["1.weight"])


def test_another_models_file_is_an_error_even_if_not_strict(tmp_path: Path) -> None:
    """Nothing at all would be loaded, and training would begin anew without a word."""
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"nothing in .* fits the model"):
        checkpoint.import_weights(tmp_path / "w.pt", build_model(), strict=False)


def test_a_tied_weight_needs_one_of_its_names(tmp_path: Path) -> None:
    """Files of safetensors hold a shared tensor once: its other name is not missing, and both are loaded."""
    save_file({"embedding.weight": torch.arange(24.0).view(6, 4)}, tmp_path / "w.safetensors")
    model = Tied()
    assert checkpoint.import_weights(tmp_path / "w.safetensors", model) == []
    assert torch.equal(model.head.weight, torch.arange(24.0).view(6, 4))
    assert model.head.weight is model.embedding.weight


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """On the meta device nothing can be loaded; torch would do nothing."""
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="meta device"):
        checkpoint.import_weights(tmp_path / "w.pt", nn.Linear(2, 2, device="meta"))


def test_a_dtype_of_its_own_stays(tmp_path: Path) -> None:
    """A model in bfloat16 stays so when a file in float32 is loaded."""
    model, weights = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2).state_dict()
    torch.save(weights, tmp_path / "w.pt")
    checkpoint.import_weights(tmp_path / "w.pt", model)
    assert_same(model.state_dict(), {name: value.bfloat16() for name, value in weights.items()})


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state dict of a sharded model."""
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}  # fmt: skip


def test_ddp_and_fsdp2_take_the_same_file(tmp_path: Path) -> None:
    """Wrapped by DDP or sharded over three ranks, unevenly, a model has the file's weights afterwards, bit for bit."""
    torch.save({"model": wrap_names(build_model(5).state_dict(), "module."), "epoch": 1}, tmp_path / "w.pt")

    def program(file: Path) -> Any:
        with rankwise.init(device="cpu"):
            ddp = rankwise.apply_ddp(build_model())
            sharded = build_model()
            fully_shard(sharded, mesh=init_device_mesh("cpu", (3,)))
            assert checkpoint.import_weights(file, ddp) == []
            assert checkpoint.import_weights(file, sharded) == []
            return ddp.module.state_dict(), gather(sharded)

    for states in run_ranks(program, 3, tmp_path / "w.pt"):
        for state in states:
            assert_same(state, build_model(5).state_dict())


def test_tensor_parallel_under_fsdp2(tmp_path: Path) -> None:
    """On a mesh of two axes, where shards are cut twice, each rank finds its piece, and no collective is needed for it."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        # Even shards: full_tensor() of torch 2.8 mixes up uneven ones.
        return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))

    torch.save(build(5).state_dict(), tmp_path / "w.pt")

    def program(file: Path) -> Any:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = build(0)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        assert checkpoint.import_weights(file, model) == []
        found = gather(model)
        dist.destroy_process_group()
        return found

    for state in run_ranks(program, 4, tmp_path / "w.pt"):
        assert_same(state, build(5).state_dict())


def test_a_folder_of_transformers_goes_straight_into_shards(tmp_path: Path) -> None:
    """Several files with an index, as save_pretrained writes them, fill a model that was born on the meta device, its tied head too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 20}  # fmt: skip
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    torch.manual_seed(5)
    original = transformers.LlamaForCausalLM(config)
    original.save_pretrained(tmp_path / "llama", max_shard_size="4KB")
    assert len(list((tmp_path / "llama").glob("model-*.safetensors"))) > 1

    def program(folder: Path) -> Any:
        with rankwise.init(device="cpu"):
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(config)
            rankwise.apply_fsdp(model, init_weights=False)
            assert checkpoint.import_weights(folder, model) == []
            tokens = torch.arange(6)[None]
            model.eval()
            with torch.no_grad():
                return gather(model), model(tokens).logits

    original.eval()
    with torch.no_grad():
        expected = original(torch.arange(6)[None]).logits
    for state, logits in run_ranks(program, 3, tmp_path / "llama"):
        assert_same(state, original.state_dict())
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_folders_that_hold_no_model_say_so(tmp_path: Path) -> None:
    """No file of weights; an index that is none, names a file elsewhere, or tensors that its file lacks."""
    model, folder = build_model(), tmp_path / "m"
    folder.mkdir()
    for text, words in (
        (None, "has no model.safetensors or pytorch_model.bin"),
        ("[]", "not an index of weights"),
        ('{"weight_map": {"0.weight": "../m/x.safetensors"}}', "elsewhere"),
        (
            '{"weight_map": {"0.weight": "x.safetensors", "7.weight": "x.safetensors"}}',
            "7.weight (of x.safetensors)",
        ),
    ):
        if text is not None:
            (folder / "model.safetensors.index.json").write_text(text)
            save_file({"0.weight": torch.ones(1)}, folder / "x.safetensors")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.import_weights(folder, model)
        assert words in str(caught.value)


# ------------------------------------------------------ import: checkpoints


def test_a_file_becomes_a_checkpoint_that_any_world_loads(tmp_path: Path) -> None:
    """`import` once, then load() resumes from it on two ranks, sharded, at the step that was given."""
    model = build_model(5)
    torch.save({"state_dict": wrap_names(model.state_dict(), "module."), "epoch": 1}, tmp_path / "w.pt")
    path = convert.import_file(tmp_path / "w.pt", tmp_path / "run", step=40)
    assert path == tmp_path / "run" / "step-40"
    assert checkpoint.verify(path) == []

    def program(folder: Path) -> Any:
        with rankwise.init(device="cpu"):
            sharded = build_model()
            fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
            return checkpoint.load(folder, {"model": sharded}), gather(sharded)

    for step, state in run_ranks(program, 2, tmp_path / "run"):
        assert step == 40
        assert_same(state, model.state_dict())
