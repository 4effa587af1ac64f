import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DDP(torch.nn.Linear(16, 16))
    opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(4, 16)).pow(2).mean().backward()
        opt.step()
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict()}, "/tmp/zero_state.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
