import os

import torch

print("gpus:", torch.cuda.device_count(), torch.cuda.get_device_name(0))
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"

import torch.distributed as dist  # noqa: E402


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    t = torch.ones(1, device="cuda")
    dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
