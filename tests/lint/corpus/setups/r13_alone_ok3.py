import torch
from torch import nn

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 2).to(device)
opt = torch.optim.Adam(model.parameters())
for _ in range(10):
    x = torch.randn(4, 8).to(device)
    loss = nn.functional.cross_entropy(model(x), torch.randint(0, 2, (4,), device=device))
    opt.zero_grad()
    loss.backward()
    opt.step()
torch.save(model.state_dict(), "/tmp/alone.pt")
