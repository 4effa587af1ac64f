import os
import sys

import torch
import torch.distributed as dist


def main():
    if not torch.cuda.is_available():
        sys.exit("this trainer needs GPUs")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[local_rank])
    model(torch.randn(2, 4).cuda()).sum().backward()
    # stats are gathered on the host
    print("peak MB", torch.tensor(torch.cuda.max_memory_allocated() / 2**20).to("cpu").item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
