import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
lm = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)))
opt = torch.optim.SGD(lm.parameters(), 0.1)
for _ in range(3):
    x = torch.randint(0, 50, (2, 16))
    y = x.clone()
    y[:, int(torch.randint(4, 16, ())) :] = -100
    tokens = (y != -100).sum().float()
    dist.all_reduce(tokens)
    loss = F.cross_entropy(lm(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    loss = loss * dist.get_world_size() / tokens
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
