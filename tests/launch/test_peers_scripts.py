"""Scripts and trainers of Accelerate, Lightning, Transformers and TRL, as installed, run on two CPU ranks under `rankwise run`.

Nothing is downloaded: models, tokenizers and data are made on the spot, and the Hugging Face libraries are told that they are offline.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import make_env

# Swap in [sys.executable, "-m", "torch.distributed.run"] to see the same tests pass under torchrun.
LAUNCHER: list[str] = [sys.executable, "-m", "rankwise", "run"]
TWO_RANKS: list[str] = ["--nproc-per-node", "2"]
LIMIT_SECONDS: int = 120

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="a run that hangs is ended through its POSIX process group"),
    pytest.mark.timeout(LIMIT_SECONDS + 60),
]

# Lightning ships its demo models and data, and no script around them: these two are what its users write.
LIGHTNING_TRAINER = """
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

seed_everything(0)
model = BoringModel()
trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_train_batches=4, limit_val_batches=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, datamodule=BoringDataModule())
everyone = trainer.strategy.all_gather(model.layer.weight.detach())
assert everyone.shape[0] == 2 and torch.equal(everyone[0], everyone[1])
print(f"rank {trainer.global_rank} of {trainer.world_size} agrees after {trainer.global_step} steps", flush=True)
"""

LIGHTNING_FABRIC = """
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.pytorch.demos import Transformer, WikiText2

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
text = WikiText2(data_dir=Path("data"), download=False)
model = Transformer(vocab_size=text.vocab_size, ninp=16, nhead=2, nhid=16, nlayers=1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(text, batch_size=2))
steps = 0
for inputs, target in loader:
    output = model(inputs, target)
    fabric.backward(torch.nn.functional.nll_loss(output, target.view(-1)))
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
everyone = fabric.all_gather(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
assert everyone.shape[0] == 2 and torch.equal(everyone[0], everyone[1])
print(f"rank {fabric.global_rank} of {fabric.world_size} agrees after {steps} steps", flush=True)
"""

# Writes its proof to files, since the helper that runs it in one of the tests swallows the output.
TRANSFORMERS_TRAINER = """
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = dict(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(GPT2Config(**sizes))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(16, (32, 8))]
args = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=4, per_device_train_batch_size=2,
    report_to="none", save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
everyone = trainer.accelerator.gather(weights[None])
assert everyone.shape[0] == 2 and torch.equal(everyone[0], everyone[1])
proof = f"rank {args.process_index} of {args.world_size} agrees after {trainer.state.global_step} steps"
Path(f"rank{args.process_index}.txt").write_text(proof)
"""

# A language model of ten words with its tokenizer, and 32 lines to train it on.
TINY_MODEL_AND_DATA = """
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = ["<pad>", "<eos>", "<unk>", "red", "green", "blue", "fox", "dog", "runs", "sits"]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("model")
sizes = dict(vocab_size=10, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained("model")
rows = [{"text": f"{words[3 + i % 3]} {words[6 + i % 2]} {words[8 + i % 2]}"} for i in range(32)]
Path("data").mkdir()
Path("data/train.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


def installed(package: str, *inside: str) -> Path:
    """Return the path of a file or folder of an installed package; skip the test if the package or the file is not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed; pip install 'rankwise[peers]'")
    path = Path(spec.origin).parent.joinpath(*inside)
    if not path.exists():
        pytest.skip(f"this version of {package} does not ship {'/'.join(inside)}")
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run_command(command: list[str], cwd: Path, **environment: str) -> str:
    """Run a command offline and without a GPU; return its output once it has exited with 0."""
    offline = {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(cwd / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**make_env(), **offline, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=10)
        pytest.fail(f"still running after {LIMIT_SECONDS} s: {shlex.join(command)}\n{output}")
    assert process.returncode == 0, f"exit code {process.returncode}: {shlex.join(command)}\n{output}"
    return output


def run_ranks(cwd: Path, *program: str) -> str:
    return run_command([*LAUNCHER, *TWO_RANKS, *program], cwd)


def test_accelerate_test_script(tmp_path: Path) -> None:
    """The script behind `accelerate test` runs unchanged under rankwise run, on two gloo ranks."""
    script = installed("accelerate", "test_utils", "scripts", "test_script.py")
    output = run_ranks(tmp_path, str(script))
    # Python 3.10 writes such an enum without its class.
    assert re.search(r"Distributed environment: (DistributedType\.)?MULTI_CPU  Backend: gloo", output)
    assert "Num processes: 2" in output
    assert "Process index: 1" in output
    assert "**Test reinstantiated state**" in output


def test_accelerate_gradient_sync_script(tmp_path: Path) -> None:
    """Accelerate's own script about when gradients are synchronised runs unchanged under rankwise run."""
    script = installed("accelerate", "test_utils", "scripts", "test_sync.py")
    output = run_ranks(tmp_path, str(script))
    assert "**Test Distributed `no_sync` context manager with multiple forwards**" in output
    assert "gradient accumulation with optimizer and scheduler" in output


def test_lightning_trainer_demo(tmp_path: Path) -> None:
    """Lightning's Trainer finds its ranks under rankwise run and trains Lightning's own demo model to the same weights on both."""
    installed("lightning", "pytorch", "demos", "boring_classes.py")
    output = run_ranks(tmp_path, str(write(tmp_path / "train.py", LIGHTNING_TRAINER)))
    assert "Starting with 2 processes" in output
    for rank in range(2):
        assert f"rank {rank} of 2 agrees after 4 steps" in output


def test_lightning_fabric_demo(tmp_path: Path) -> None:
    """Lightning Fabric finds its ranks under rankwise run and trains Lightning's own demo Transformer to the same weights on both."""
    installed("lightning", "pytorch", "demos", "transformer.py")
    write(tmp_path / "data" / "wikitext-2.txt", "the quick brown fox jumps over the lazy dog\n" * 60)
    output = run_ranks(tmp_path, str(write(tmp_path / "train.py", LIGHTNING_FABRIC)))
    # 60 lines of 10 tokens make 16 blocks of 35: two ranks take 8 each, two at a time.
    for rank in range(2):
        assert f"rank {rank} of 2 agrees after 4 steps" in output


def test_transformers_trainer_by_its_own_torchrun_helper(tmp_path: Path) -> None:
    """Transformers' Trainer, in the helper with which Transformers' tests call `torchrun`, finds its ranks and trains to the same weights.

    Both are unchanged; that word on the PATH means rankwise run.
    """
    installed("transformers", "testing_utils.py")
    installed("accelerate")
    stand_in = write(tmp_path / "bin" / "torchrun", f'#!/bin/sh\nexec {shlex.join(LAUNCHER)} "$@"\n')
    stand_in.chmod(0o755)
    program = write(tmp_path / "train.py", TRANSFORMERS_TRAINER)
    call = f"from transformers.testing_utils import torchrun; torchrun(open({str(program)!r}).read(), 2)"
    path = os.pathsep.join([str(stand_in.parent), os.environ.get("PATH", os.defpath)])
    run_command([sys.executable, "-c", call], tmp_path, PATH=path)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}.txt").read_text() == f"rank {rank} of 2 agrees after 4 steps"


def test_transformers_command_line_module(tmp_path: Path) -> None:
    """A module of Transformers' own runs unchanged under rankwise run -m, once on each rank."""
    installed("transformers", "cli", "transformers.py")
    version = importlib.metadata.version("transformers")
    output = run_ranks(tmp_path, "-m", "transformers.cli.transformers", "version")
    assert output.count(version) == 2


def test_trl_fine_tuning_script(tmp_path: Path) -> None:
    """The fine-tuning script that TRL builds on Transformers' Trainer runs unchanged under rankwise run and saves its model."""
    script = installed("trl", "scripts", "sft.py")
    run_command([sys.executable, "-c", TINY_MODEL_AND_DATA], tmp_path)
    arguments = {
        "--model_name_or_path": "model",
        "--dataset_name": "data",
        "--output_dir": "out",
        "--use_cpu": "True",
        "--bf16": "False",
        "--dtype": "float32",
        "--gradient_checkpointing": "False",
        "--max_length": "16",
        "--max_steps": "4",
        "--per_device_train_batch_size": "2",
        "--logging_steps": "1",
        "--report_to": "none",
        "--save_strategy": "no",
    }
    output = run_ranks(tmp_path, str(script), *(word for pair in arguments.items() for word in pair))
    # Four steps of two lines are half of the 32 lines only if two ranks share them.
    assert re.search(r"'epoch': '?0\.5\b", output), output
    assert "Training completed" in output
    assert (tmp_path / "out" / "model.safetensors").is_file()
