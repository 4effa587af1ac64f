import torch
import torch.distributed as dist
import torch.nn.functional as F
from comm import concat_all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


def supcon(z, labels, t=0.1):
    z = concat_all_gather(F.normalize(z, dim=1))
    labels = concat_all_gather(labels)
    sim = z @ z.t() / t
    same = (labels[:, None] == labels[None]).float().fill_diagonal_(0)
    logp = sim - torch.logsumexp(sim, dim=1, keepdim=True)
    return -(same * logp).sum(1).div(same.sum(1).clamp(min=1)).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(16, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        loss = supcon(model(torch.randn(8, 16)), torch.randint(0, 3, (8,)))
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
