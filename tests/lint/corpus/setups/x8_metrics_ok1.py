import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
ds = TensorDataset(torch.randn(101, 4), torch.randint(0, 3, (101,)))
model, loader = accelerator.prepare(torch.nn.Linear(4, 3), DataLoader(ds, batch_size=8))
model.eval()
right = seen = 0
for x, y in loader:
    with torch.no_grad():
        out = model(x).argmax(-1)
    p, r = accelerator.gather_for_metrics((out, y))
    right += (p == r).sum().item()
    seen += len(r)
accelerator.print("acc", right / seen)
accelerator.end_training()
