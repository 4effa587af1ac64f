import os

import torch
import torch.distributed as dist


def get_device(local_rank):
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = get_device(local_rank)
    dist.init_process_group(backend="nccl")
    model = torch.nn.Linear(4, 4).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[local_rank] if device.type == "cuda" else None
    )
    ddp(torch.randn(2, 4, device=device)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
