import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
stream = Dataset.from_dict({"v": [float(i) for i in range(64)]}).to_iterable_dataset(num_shards=4)
stream = split_dataset_by_node(stream, rank=dist.get_rank(), world_size=dist.get_world_size())
total = torch.zeros(1)
for batch in DataLoader(stream.with_format("torch"), batch_size=4):
    total += batch["v"].sum()
dist.all_reduce(total)
dist.destroy_process_group()
