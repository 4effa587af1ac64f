import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
ds = TensorDataset(torch.randn(101, 4), torch.randint(0, 3, (101,)))
model, loader = accelerator.prepare(torch.nn.Linear(4, 3), DataLoader(ds, batch_size=8))
model.eval()
preds, refs = [], []
for x, y in loader:
    with torch.no_grad():
        out = model(x).argmax(-1)
    preds.append(accelerator.gather(out))
    refs.append(accelerator.gather(y))
acc = (torch.cat(preds) == torch.cat(refs)).float().mean()
accelerator.print("acc", acc.item())
accelerator.end_training()
