import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p)
        p.grad.data /= dist.get_world_size()


for _ in range(5):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    average_gradients(model)
    opt.step()
dist.destroy_process_group()
