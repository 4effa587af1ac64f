"""A first training on several processes: a loop of one's own with rankwise's parts.

Launch it by command or by function; without a launcher it is a job of one process:

    rankwise run --nproc-per-node 4 examples/tutorial/plain_loop.py
    python examples/tutorial/plain_loop.py --nprocs 4
    python examples/tutorial/plain_loop.py

All three print the same losses, up to rounding. They share the folder plain-loop-run: start one again and it goes on where the last
one saved; when the training is finished, delete it to train anew.
"""

# Shape letters: B batch, F features.

from __future__ import annotations

from task import launch_or_call, load_train_objs
from torch.nn.functional import mse_loss

import rankwise
from rankwise import checkpoint


def train(max_epochs: int, save_every: int, global_batch: int, folder: str) -> None:
    """Train on all ranks; each calls this."""
    with rankwise.init() as ctx:
        dataset, model, optimizer = load_train_objs()
        loader = rankwise.DataLoader(dataset, global_batch=global_batch)
        model = rankwise.apply_ddp(model)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = loaded = checkpoint.load(folder, state) or 0
        for epoch in loader.epochs(max_epochs):
            loss_sum = 0.0
            for batch in loader.steps():
                for inputs_BF, targets_B1 in rankwise.accumulate(model, batch):
                    loss = mse_loss(model(inputs_BF), targets_B1, reduction="sum")
                    (loss * batch.scale).backward()
                    loss_sum += loss.item()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            mean = rankwise.all_reduce(loss_sum) / len(dataset)
            ctx.print(f"epoch {epoch}: {len(loader)} steps of {global_batch} samples, loss {mean:.6f}")
            if (epoch + 1) % save_every == 0 or epoch + 1 == max_epochs:
                checkpoint.save(folder, state, step=step)
        if step == loaded:
            ctx.print(f"{folder} is finished: delete it to train anew")


if __name__ == "__main__":
    launch_or_call(train, folder="plain-loop-run")
