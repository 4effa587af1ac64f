import signal

import torch
import torch.distributed as dist

STOP = {"now": False}
signal.signal(signal.SIGTERM, lambda *_: STOP.update(now=True))


def main():
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(100000):
        if STOP["now"]:
            break
        opt.zero_grad()
        net(torch.randn(2, 2)).sum().backward()
        opt.step()
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "step": step}, "stop.pt")
    dist.destroy_process_group()


main()
