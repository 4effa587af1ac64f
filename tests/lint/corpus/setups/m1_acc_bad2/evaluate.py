import torch


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    right = total = 0
    for x, y in loader:
        right += (net(x).argmax(-1) == y).sum().item()
        total += y.numel()
    return right / total
