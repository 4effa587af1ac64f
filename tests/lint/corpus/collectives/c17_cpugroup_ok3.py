import os

import torch
import torch.distributed as dist


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    cpu_group = dist.new_group(backend="gloo")
    lengths = torch.tensor([10 + dist.get_rank()])
    dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=cpu_group)
    print(dist.get_rank(), int(lengths))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
