import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
pairs = TensorDataset(torch.randn(512, 20), torch.randn(512, 20))
loader = DataLoader(pairs, batch_size=32, shuffle=True, drop_last=True)
encoder = torch.nn.Linear(20, 8)
opt = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
encoder, opt, loader = accelerator.prepare(encoder, opt, loader)

for a, b in loader:
    za = F.normalize(encoder(torch.cat([a, b])), dim=-1)
    za, zb = za.chunk(2)
    all_a = accelerator.gather(za)
    all_b = accelerator.gather(zb)
    sim = all_a @ all_b.t() / 0.1
    loss = F.cross_entropy(sim, torch.arange(len(sim), device=sim.device))
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
