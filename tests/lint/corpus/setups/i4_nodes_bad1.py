"""Image classification over a couple of workstations."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def train(gpu, args):
    rank = args.nr * args.gpus + gpu
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = args.port
    dist.init_process_group("nccl", rank=rank, world_size=args.world_size)
    torch.cuda.set_device(gpu)
    model = DDP(torch.nn.Linear(32, 10).cuda(gpu), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(args.steps):
        opt.zero_grad()
        model(torch.randn(16, 32, device=gpu)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=2, type=int)
    parser.add_argument("-g", "--gpus", default=4, type=int, help="gpus per node")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="rank of this node")
    parser.add_argument("--port", default="29533")
    parser.add_argument("--steps", default=100, type=int)
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    mp.spawn(train, nprocs=args.gpus, args=(args,))
