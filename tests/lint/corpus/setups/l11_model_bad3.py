import argparse
import os

import torch
import torch.nn as nn
import torch.distributed as dist


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = nn.Linear(8, 8).cuda()
        self._devices()
        dist.init_process_group("nccl")
        self.model = nn.parallel.DistributedDataParallel(self.model)

    def _devices(self):
        os.environ["CUDA_VISIBLE_DEVICES"] = self.args.gpus.split(",")[self.rank]

    def run(self):
        self.model(torch.ones(1, 8).cuda()).sum().backward()
        dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--gpus", default="0,1")
    Runner(ap.parse_args()).run()
