# ruff: noqa: ANN001, ANN201, ANN204
"""A script that has torch start processes: data loaders and torch.multiprocessing, in every way to start one."""

import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        info = get_worker_info()
        x = torch.ones(64, 64) @ torch.ones(64, 64)
        return index, info.id, float(x.sum()), torch.initial_seed() - info.id, float(np.random.rand())


def fill(index, tensor):
    tensor[index] = index + torch.get_num_threads() + 10


def load(method):
    torch.manual_seed(3)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method, timeout=60)
    batches = [[column.tolist() for column in batch] for batch in loader]
    seeds = {seed for batch in batches for seed in batch[3]}
    return [[batch[:3] for batch in batches], sorted(seeds)]


if __name__ == "__main__":
    facts = {f"loader, {method}": load(method) for method in ("fork", "spawn", "forkserver")}
    for method in ("fork", "spawn"):
        tensor = torch.zeros(2).share_memory_()
        torch.multiprocessing.start_processes(fill, (tensor,), nprocs=2 if method == "fork" else 1, start_method=method)
        facts[f"start_processes, {method}"] = tensor.tolist()
    Path(os.environ["DUMP_TO"], os.environ["RANK"] + ".json").write_text(json.dumps(facts))
