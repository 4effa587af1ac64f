import torch

cache = torch.load("/tmp/features_cpu.pt") if False else torch.randn(10, 4)
model = torch.nn.Linear(4, 2)
loss = model(cache).sum()
loss.backward()
