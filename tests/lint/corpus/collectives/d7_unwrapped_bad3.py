import torch
from torch import distributed as td
from torch.nn import parallel


def fit(net, data, epochs):
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for x in data:
            loss = net(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    net = torch.nn.Linear(4, 4)
    ddp_net = parallel.DistributedDataParallel(net)
    fit(net, [torch.randn(2, 4) for _ in range(5)], epochs=2)
    if td.get_rank() == 0:
        torch.save(ddp_net.module.state_dict(), "net.pt")
    td.destroy_process_group()


if __name__ == "__main__":
    main()
