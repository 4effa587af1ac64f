import torch


@torch.inference_mode()
def evaluate(net, batches=3):
    net.eval()
    hits = total = 0
    for _ in range(batches):
        x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
        hits += int((net(x).argmax(1) == y).sum())
        total += len(y)
    return hits / total
