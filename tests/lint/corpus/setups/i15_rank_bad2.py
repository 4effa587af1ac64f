import logging
import sys

import torch
import torch.distributed as dist


def build_logger(name):
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


def setup():
    dist.init_process_group(backend="gloo", init_method="env://")


def main():
    logger = build_logger("train")
    setup()
    x = torch.ones(4)
    dist.all_reduce(x)
    logger.info("world %d", dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
