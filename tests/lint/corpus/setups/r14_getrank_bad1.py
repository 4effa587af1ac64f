import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(4, 4).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    opt.step()
dist.destroy_process_group()
