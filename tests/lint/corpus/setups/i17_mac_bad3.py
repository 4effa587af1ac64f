import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world, port):
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dev = torch.device("mps")
    net = torch.nn.Linear(16, 16).to(dev)
    out = net(torch.randn(4, 16, device=dev))
    out.sum().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    s = socket.socket()
    s.bind(("", 0))
    port = s.getsockname()[1]
    s.close()
    mp.spawn(worker, (2, port), nprocs=2)
