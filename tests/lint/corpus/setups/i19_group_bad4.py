from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Comm:
    barrier_timeout: float = 30.0
    group_timeout: float = 600.0


def make_groups(cfg: Comm):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    return dist.new_group(list(range(world)), timeout=cfg.group_timeout)


def main():
    cfg = Comm()
    group = make_groups(cfg)
    t = torch.ones(1)
    dist.all_reduce(t, group=group)
    dist.monitored_barrier(timeout=cfg.barrier_timeout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
