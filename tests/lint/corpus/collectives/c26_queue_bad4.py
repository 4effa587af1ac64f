import queue

import torch
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group


def fill(q):
    gen = torch.Generator().manual_seed(get_rank())
    for _ in range(int(torch.randint(3, 9, (1,), generator=gen))):
        q.put(torch.rand(2, generator=gen))


def drain(q):
    total = torch.zeros(2)
    while not q.empty():
        item = q.get()
        all_reduce(item)
        total += item
    return total


init_process_group("gloo")
jobs = queue.Queue()
fill(jobs)
print(get_rank(), drain(jobs).tolist())
destroy_process_group()
