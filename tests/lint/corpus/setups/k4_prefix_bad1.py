import torch
import torch.distributed as dist


def train():
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    ddp(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 0:
        torch.save(ddp.state_dict(), "model.pt")
    dist.barrier()
    dist.destroy_process_group()


def infer():
    net = torch.nn.Linear(4, 2)
    net.load_state_dict(torch.load("model.pt", map_location="cpu"))
    return net(torch.ones(1, 4))


if __name__ == "__main__":
    train()
    print(infer())
