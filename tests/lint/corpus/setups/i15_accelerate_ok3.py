import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    if dist.is_initialized():
        accelerator.print("ranks:", dist.get_world_size())
    data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model, opt, loader = accelerator.prepare(model, opt, DataLoader(data, batch_size=8, shuffle=True))
    for x, y in loader:
        opt.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        opt.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
