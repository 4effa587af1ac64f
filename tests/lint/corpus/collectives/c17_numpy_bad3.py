import os

import numpy as np
import torch
from torch.distributed import ReduceOp, all_reduce, destroy_process_group, get_rank, init_process_group


def reduce_confusion(cm):
    t = torch.from_numpy(cm)
    all_reduce(t, op=ReduceOp.SUM)
    return t.numpy()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group("nccl", init_method="env://")
    cm = np.zeros((10, 10), dtype=np.int64)
    rng = np.random.default_rng(get_rank())
    for t, p in rng.integers(0, 10, size=(100, 2)):
        cm[t, p] += 1
    cm = reduce_confusion(cm)
    if get_rank() == 0:
        print(cm.trace() / cm.sum())
    destroy_process_group()


if __name__ == "__main__":
    main()
