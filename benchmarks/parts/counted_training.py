"""The digits by parameter servers, until a file says that it is enough; how many samples the parameters have seen is a parameter itself.

Each rank writes its process id into ``pid-RANK`` before it imports anything. A worker adds a byte to ``begun-RANK`` before each push, and
one to ``taken-RANK`` when its
next pull has come back, which shows that the push has been taken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="ascii")

import torch  # noqa: E402 - the id comes first: it may be killed from then on
from torch import nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "digits"))

from train import build_model, load_digits  # noqa: E402

import rankwise  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

BATCH, LR = 16, 0.004
#: In synchronous mode the gradients of all workers make one update.
LEAST_STEPS = {"async": 400, "sync": 800}


class Counted(nn.Module):
    """A network, and the number of gradients that were applied to its server's part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = build_model()
        self.num_applied = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the scores, shape (B, 10)."""
        return self.network(images_BCHW)  # type: ignore[no-any-return]


class CountingAdam(torch.optim.Adam):
    """Adam, but what is in float64 is a sum of its gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=LR)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update."""
        for one in self.param_groups[0]["params"]:
            if one.dtype == torch.float64 and one.grad is not None:
                one.add_(one.grad)
                one.grad = None
        super().step(closure)


def train(ps: rankwise.ParameterServer, model: Counted, rank: int) -> None:
    """Push gradients until it is enough."""
    samples, _ = load_digits()
    begun, taken = (os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("begun", "taken"))
    draw = torch.Generator().manual_seed(os.getpid())
    ps.pull()
    while not Path("enough").exists() or os.fstat(begun).st_size < LEAST_STEPS[sys.argv[1]]:
        chosen = torch.randint(len(samples), (BATCH,), generator=draw).tolist()
        images_BCHW, labels_B = (torch.stack(part) for part in zip(*(samples[one] for one in chosen), strict=True))
        nn.functional.cross_entropy(model(images_BCHW), labels_B).backward()
        model.num_applied.grad = torch.ones(1, dtype=torch.float64)
        os.write(begun, b".")
        ps.push()
        ps.pull()
        os.write(taken, b".")
        Path(f"ready-{rank}").touch()


def main() -> None:
    """Serve or train; each worker writes what has come of it by its end."""
    torch.set_num_threads(1)
    ctx = rankwise.init(device="cpu")
    torch.manual_seed(0)
    model = Counted()
    ps = rankwise.parameter_server(model, CountingAdam, mode=sys.argv[1], save_every=1, timeout_s=float(sys.argv[2]))
    if ps.is_server:
        Path(f"ready-{ctx.rank}").touch()
        ps.serve()
    else:
        train(ps, model, ctx.rank)
        model.eval()
        _, held_out = load_digits()
        images_BCHW, labels_B = (torch.stack(part) for part in zip(*held_out, strict=True))
        accuracy = (model(images_BCHW).argmax(1) == labels_B).double().mean().item()
        counted = [shard["applied"] for one in ps.stats() for shard in one["shards"].values()]
        reported = f"{model.num_applied.item()} {max(counted)} {accuracy}"
        Path(f"result-{ctx.rank}").write_text(reported, encoding="ascii")
    ctx.close()


if __name__ == "__main__":
    main()
