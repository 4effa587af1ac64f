import os

import torch
import torch.distributed as dist

from backbone import build

gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
net = build("weights/resnet_cuda.pth").cuda()
net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[gpu])
net(torch.randn(2, 8).cuda()).sum().backward()
dist.destroy_process_group()
