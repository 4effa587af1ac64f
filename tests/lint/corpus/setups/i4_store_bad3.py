from dataclasses import dataclass
import os

import torch
import torch.distributed as dist


@dataclass
class ClusterConfig:
    num_nodes: int = 4
    gpus_per_node: int = 8
    node_rank: int = int(os.environ.get("NODE_RANK", "0"))
    port: int = 6007

    @property
    def world_size(self):
        return self.num_nodes * self.gpus_per_node


def setup(cfg, local_rank):
    rank = cfg.node_rank * cfg.gpus_per_node + local_rank
    store = dist.TCPStore("localhost", cfg.port, cfg.world_size, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=cfg.world_size)
    torch.cuda.set_device(local_rank)
    return rank


def worker(local_rank, cfg):
    setup(cfg, local_rank)
    t = torch.ones(1, device="cuda")
    dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    cfg = ClusterConfig()
    torch.multiprocessing.spawn(worker, args=(cfg,), nprocs=cfg.gpus_per_node)
