import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def gae(r, v):
    return r - v


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    pi = DDP(torch.nn.Linear(4, 2))
    vf = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.Adam(list(pi.parameters()) + list(vf.parameters()), lr=3e-4)
    for it in range(10):
        obs = torch.randn(32, 4)
        with torch.no_grad():
            v = vf(obs)
        adv = gae(torch.randn(32, 1), v)
        stats = torch.stack([adv.sum(), adv.pow(2).sum(), torch.tensor(float(adv.numel()))])
        dist.all_reduce(stats)
        mu = stats[0] / stats[2]
        adv = (adv - mu) / (stats[1] / stats[2] - mu ** 2).sqrt()
        for _ in range(4):
            logp = pi(obs).log_softmax(-1)[:, :1]
            loss = -(logp * adv).mean() + (vf(obs) - adv).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            kl = logp.mean().detach().clone()
            dist.all_reduce(kl, op=dist.ReduceOp.AVG)
            if kl > 0.02:
                break
    dist.destroy_process_group()


main()
