"""Train the network of train.py asynchronously: servers hold its weights, workers send gradients whenever they have some.

    rankwise run --role-counts ps=2,worker=3 --max-restarts 20 examples/digits/parameter_server.py

Any of these processes may be killed meanwhile: it alone is started again, and nothing that it had sent is lost or applied twice. A worker
goes on at the step that it has counted in the job's store; a server at its last copy, which is in the host's memory.

The learning rate was chosen on validation digits, of 0.001, 0.002 and 0.004. The held-out digits, the same as train.py's, are read at the end.
"""

# Shape letters: B batch, C channel, H row, W column.

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split
from train import build_model, load_digits

import rankwise

SPLIT_SEED = 1
#: A process that is started again has to import torch.
RETURN_S = 120.0


def measure(model: nn.Module, samples: Dataset[tuple[Tensor, ...]]) -> float:
    """Return the share of samples that are read rightly."""
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels) for images, labels in DataLoader(samples, batch_size=256)]
    return torch.cat(right).double().mean().item()


def wait_for_others(ps: rankwise.ParameterServer) -> None:
    """Wait until the other workers have ended; those that are lost have some time to be started again."""
    last_s = time.monotonic()  # when some worker was there that had not ended
    while len((report := ps.stats()[0])["ended"]) < ps.num_workers - 1:
        if len(report["ended"]) + len(report["lost"]) < ps.num_workers - 1:
            last_s = time.monotonic()
        elif time.monotonic() - last_s > RETURN_S:
            break
        time.sleep(0.05)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a digit classifier with parameter servers.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one gradient")
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Serve, or train."""
    args = parse_arguments()
    torch.set_num_threads(1)  # a core for each process
    ctx = rankwise.init(device="cpu")
    torch.manual_seed(args.seed)
    model = build_model()
    ps = rankwise.parameter_server(model, lambda ones: torch.optim.Adam(ones, lr=args.lr), mode="async", save_every=1)
    if ps.is_server:
        ps.serve()
        ctx.close()
        return

    train, held_out = load_digits()
    train, validation = random_split(train, [0.85, 0.15], generator=torch.Generator().manual_seed(SPLIT_SEED))
    num_steps = args.epochs * len(train) // (args.batch_size * ps.num_workers)
    counter = f"steps of {ctx.rank}"
    while (step := ctx.store.add(counter, 1)) <= num_steps:
        draw = torch.Generator().manual_seed(hash((args.seed, ctx.rank, step)))
        chosen = torch.randint(len(train), (args.batch_size,), generator=draw).tolist()
        images_BCHW, labels_B = (torch.stack(part) for part in zip(*(train[one] for one in chosen), strict=True))
        ps.pull()
        nn.functional.cross_entropy(model(images_BCHW), labels_B).backward()
        ps.push()
        if ps.worker_index == 0 and step % 100 == 0:
            print(f"step {step} of {num_steps}", flush=True)

    if ps.worker_index == 0:
        wait_for_others(ps)
        ps.pull()
        print(
            f"accuracy {measure(model, validation):.4f} on validation digits, {measure(model, held_out):.4f} on held-out digits"
        )
    ctx.close()


if __name__ == "__main__":
    main()
