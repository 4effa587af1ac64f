from accelerate import Accelerator, InitProcessGroupKwargs
import torch

TIMEOUT = 60 * 60 * 2


def build():
    kwargs = InitProcessGroupKwargs(timeout=TIMEOUT)
    return Accelerator(cpu=True, kwargs_handlers=[kwargs])


if __name__ == "__main__":
    acc = build()
    net = acc.prepare(torch.nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    acc.end_training()
