"""The same model, data and weights under TensorFlow's MirroredStrategy and under rankwise.tf's: two replicas each, float64, losses side by side.

python benchmarks/tensorflow_losses.py [PYTHON-THAT-HAS-TENSORFLOW]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from rankwise import tf
from rankwise.testing import run_ranks

#: Keras keeps the learning rate in float32: this one is exact there.
NUM_SAMPLES, BATCH, EPOCHS, LR, MOMENTUM = 603, 64, 5, 0.25, 0.875
_THEIRS = """
    import json, os, sys
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import numpy as np, tensorflow as tf
    told = json.load(open(sys.argv[1]))
    tf.keras.backend.set_floatx("float64")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    x, y = np.array(told["x"]), np.array(told["y"])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(told["batch"]))
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(32, activation="tanh"), tf.keras.layers.Dense(4)])
        model.build((None, x.shape[1]))
        model.set_weights([np.array(one) for one in told["weights"]])
        optimizer = tf.keras.optimizers.SGD(told["lr"], momentum=told["momentum"])
        losses_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    def step(batch, size):
        features, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses_of(labels, model(features)), global_batch_size=size)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss
    @tf.function(reduce_retracing=True)
    def run(batch, size):
        return strategy.reduce("SUM", strategy.run(step, args=(batch, size)), axis=None)
    told_losses = []
    for _ in range(told["epochs"]):
        for number, batch in enumerate(data):
            size = min(told["batch"], len(x) - number * told["batch"])
            told_losses.append(float(run(batch, size)))
    print(json.dumps({"version": tf.__version__, "losses": told_losses}))
"""


def make_problem() -> tuple[TensorDataset, nn.Sequential]:
    """Return data and a model, in float64."""
    generator = torch.Generator().manual_seed(7)
    centres = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (NUM_SAMPLES,), generator=generator)
    inputs = centres[labels] + 1.5 * torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    return TensorDataset(inputs, labels), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def run_ours() -> list[float]:
    """Train on this rank; return the losses."""
    torch.set_num_threads(1)
    strategy = tf.MirroredStrategy()
    with strategy.scope():
        dataset, model = make_problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step(features: torch.Tensor, labels: torch.Tensor, size: int) -> torch.Tensor:
        losses = cross_entropy(model(features), labels, reduction="none")
        loss = tf.compute_average_loss(losses, global_batch_size=size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    data = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=BATCH))
    for _ in range(EPOCHS):
        for number, batch in enumerate(data):
            size = min(BATCH, NUM_SAMPLES - number * BATCH)
            found.append(strategy.reduce("SUM", strategy.run(step, args=(*batch, size))).item())
    return found


def run_theirs(python: str) -> dict[str, Any]:
    """Train by TensorFlow; return its version and the losses."""
    dataset, model = make_problem()
    weights = [one.detach().T.tolist() if one.dim() == 2 else one.tolist() for one in model.parameters()]
    reported = {"x": dataset.tensors[0].tolist(), "y": dataset.tensors[1].tolist(), "weights": weights, "batch": BATCH, "epochs": EPOCHS,
            "lr": LR, "momentum": MOMENTUM}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.json"
        problem.write_text(json.dumps(reported))
        done = subprocess.run(
            [python, "-c", textwrap.dedent(_THEIRS), str(problem)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if done.returncode:
        print(f"skipped: TensorFlow did not run with {python}: {done.stderr.strip().splitlines()[-1]}")
        sys.exit(0)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Run both, and print the losses of each epoch's first step and the greatest difference of all steps."""
    theirs = run_theirs(sys.argv[1] if len(sys.argv) > 1 else sys.executable)
    ours, other = run_ranks(run_ours, 2)
    if ours != other:
        sys.exit("the replicas of rankwise.tf disagree")
    steps = len(ours) // EPOCHS
    print(f"step    TensorFlow {theirs['version']}        rankwise.tf, torch {torch.__version__}")
    for number in [*range(0, len(ours), steps), len(ours) - 1]:
        print(f"{number:4}    {theirs['losses'][number]:.15f}    {ours[number]:.15f}")
    greatest = max(abs(a - b) for a, b in zip(theirs["losses"], ours, strict=True))
    print(f"greatest difference of {len(ours)} losses: {greatest:.1e}")


if __name__ == "__main__":
    main()
