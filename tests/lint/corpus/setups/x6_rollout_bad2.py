import random

import numpy as np
import torch
import torch.distributed as dist


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Env:
    def reset(self):
        return torch.from_numpy(np.random.rand(4).astype("float32"))


def main(seed=1):
    dist.init_process_group("gloo")
    set_seed(seed)
    env = Env()
    policy = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    opt = torch.optim.Adam(policy.parameters())
    for _ in range(50):
        obs = torch.stack([env.reset() for _ in range(8)])
        d = torch.distributions.Categorical(logits=policy(obs))
        a = d.sample()
        loss = -(d.log_prob(a) * torch.randn(8)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()
