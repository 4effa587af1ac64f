import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    critic = DDP(torch.nn.Linear(8, 1))
    critic_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
    actor = torch.nn.Linear(4, 8)
    fully_shard(actor)
    actor_opt = torch.optim.SGD(actor.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        critic(actor(torch.randn(2, 4))).mean().backward()
        for o in (critic_opt, actor_opt):
            o.step()
            o.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
