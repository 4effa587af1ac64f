import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class AverageMeter:
    def __init__(self, device):
        self.sum, self.count, self.device = 0.0, 0, device

    def update(self, v, n=1):
        self.sum += v * n
        self.count += n

    @property
    def global_avg(self):
        t = torch.tensor([self.sum, self.count], dtype=torch.float64, device=self.device)
        dist.barrier()
        dist.all_reduce(t)
        return (t[0] / t[1]).item()


def train(model, opt, steps, device):
    meter = AverageMeter(device)
    for i in range(steps):
        loss = model(torch.randn(8, 4, device=device)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.update(loss.item())
        if i % 10 == 0 and dist.get_rank() == 0:
            print(f"step {i} loss {meter.global_avg:.4f}")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    net = DDP(torch.nn.Linear(4, 1).to(device), device_ids=[device])
    train(net, torch.optim.SGD(net.parameters(), 0.1), 100, device)
    dist.destroy_process_group()
