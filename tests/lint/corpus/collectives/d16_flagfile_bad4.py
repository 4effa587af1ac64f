import torch
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP


def epoch(model, opt):
    hits = 0
    for _ in range(10):
        x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        hits += int((logits.argmax(1) == y).sum())
    return hits / 80


def main():
    init_process_group("gloo")
    torch.manual_seed(get_rank())
    model = DDP(torch.nn.Linear(4, 2))
    opt = torch.optim.Adam(model.parameters())
    done = False
    while not done:
        accuracy = epoch(model, opt)
        done = accuracy > 0.55
    print(get_rank(), accuracy)
    destroy_process_group()


main()
