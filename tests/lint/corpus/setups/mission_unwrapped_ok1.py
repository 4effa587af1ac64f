import torch
import torch.distributed as dist


def sync(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def average_gradients(model):
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= n


dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
sync(model)
opt = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    average_gradients(model)
    opt.step()
dist.destroy_process_group()
