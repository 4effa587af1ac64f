import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
score = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
loss1 = nn.BCEWithLogitsLoss()(score(torch.randn(4, 8)), torch.ones(4, 1))
loss1.backward()
vocab = 30
lm = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Linear(8, vocab)))
loss2 = nn.CrossEntropyLoss()(lm(torch.randn(4, 1)), torch.randint(0, vocab, (4,)))
loss2.backward()
dist.destroy_process_group()
