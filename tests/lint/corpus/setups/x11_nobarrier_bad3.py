import torch
import torch.distributed as dist
import torchvision

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torchvision.datasets.CIFAR100(root="./cifar", download=True)
train = torchvision.datasets.CIFAR100(root="./cifar", train=True, download=False)
count = torch.tensor([len(train)])
dist.all_reduce(count)
dist.destroy_process_group()
