import torch
import torch.distributed as dist


def mean_over_ranks(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


REPORTERS = {
    "loss": lambda t: f"loss {mean_over_ranks(t).item():.3f}",
    "norm": lambda t: f"norm {t.norm().item():.3f}",
}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loss = torch.rand(1)
    dist.get_rank() or print(REPORTERS["loss"](loss))
    dist.destroy_process_group()


main()
