import torch
import torch.distributed as dist
from tqdm import tqdm


def main():
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    bar = tqdm(range(200), desc="train")
    for step in bar:
        opt.zero_grad()
        net(torch.randn(2, 4)).sum().backward()
        opt.step()
        if step % 50 == 0:
            print("step", step)
    print("training finished")
    dist.destroy_process_group()


main()
