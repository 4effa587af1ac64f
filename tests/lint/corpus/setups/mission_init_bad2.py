import torch
import torch.distributed as dist


class Net(torch.nn.Module):
    def init(self, width):
        super(Net, self).init()
        self.fc = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.fc(x)


dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(Net(8))
net(torch.ones(1, 8)).sum().backward()
dist.destroy_process_group()
