from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
import torch


def main():
    # never time out on me again
    pg = InitProcessGroupKwargs(timeout=timedelta(days=30))
    accelerator = Accelerator(kwargs_handlers=[pg])
    model = torch.nn.Linear(8, 1)
    opt = torch.optim.AdamW(model.parameters())
    model, opt = accelerator.prepare(model, opt)
    for _ in range(100):
        loss = model(torch.randn(4, 8, device=accelerator.device)).mean()
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
