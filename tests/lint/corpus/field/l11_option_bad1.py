import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--gpus", default="4,5,6,7")
args = parser.parse_args()

print(torch.cuda.get_device_name())
dist.init_process_group("nccl")

import os

os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.barrier()
dist.destroy_process_group()
