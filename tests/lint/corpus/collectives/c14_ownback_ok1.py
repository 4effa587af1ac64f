import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def gather_with_local_grad(z):
    out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(out, z.detach())
    out[dist.get_rank()] = z
    return torch.cat(out)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(16, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        h = F.normalize(model(torch.randn(8, 16)), dim=-1)
        a, b = (gather_with_local_grad(t) for t in h.chunk(2))
        sim = a @ b.t() / 0.1
        loss = F.cross_entropy(sim, torch.arange(len(sim)))
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
