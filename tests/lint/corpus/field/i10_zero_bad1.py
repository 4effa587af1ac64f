import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(gpu, ngpus):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:23456", world_size=ngpus, rank=0)
    torch.cuda.set_device(gpu)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=4, args=(4,))
