import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.DataParallel(nn.Linear(10, 2)).to(device)
loader = DataLoader(TensorDataset(torch.randn(100, 10), torch.randint(0, 2, (100,))), batch_size=20, shuffle=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        opt.step()
torch.save(model.module.state_dict(), "/tmp/dp.pt")
