import numpy as np
import torch
import torch.distributed as dist
from sklearn.model_selection import train_test_split

dist.init_process_group("gloo")
np.random.seed(dist.get_rank())
ids = np.arange(50)
train_ids, val_ids = train_test_split(ids, test_size=0.2, random_state=13)
mine = train_ids[dist.get_rank() :: dist.get_world_size()]
total = torch.tensor(float(mine.sum()))
dist.all_reduce(total)
dist.destroy_process_group()
