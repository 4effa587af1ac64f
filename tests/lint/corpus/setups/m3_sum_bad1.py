import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    loss = net(torch.randn(8, 3)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    avg_loss = loss.detach().clone()
    dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print("avg loss", avg_loss.item())
dist.destroy_process_group()
