import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler


def collate(seqs):
    x = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True)
    y = torch.nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=-100)
    return x, y


dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
texts = [torch.randint(1, 50, (int(n),), generator=g) for n in torch.randint(4, 60, (64,), generator=g)]
sampler = DistributedSampler(texts)
lm = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)))
opt = torch.optim.SGD(lm.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(texts, 4, sampler=sampler, collate_fn=collate):
        loss = F.cross_entropy(lm(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
