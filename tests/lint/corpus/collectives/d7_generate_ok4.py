import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LM(nn.Module):
    def __init__(self, vocab=20):
        super().__init__()
        self.emb, self.out = nn.Embedding(vocab, 8), nn.Linear(8, vocab)

    def forward(self, ids):
        return self.out(self.emb(ids))

    @torch.inference_mode()
    def generate(self, ids, n):
        for _ in range(n):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(LM())
opt = torch.optim.Adam(model.parameters())
for step in range(6):
    ids = torch.randint(0, 20, (2, 9))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0 and dist.get_rank() == 0:
        print(model.module.generate(ids[:1, :1], 5).tolist())
dist.destroy_process_group()
