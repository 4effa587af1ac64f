import torch
import torch.distributed as dist


def reduce_metrics(metrics):
    for name in set(metrics):
        dist.all_reduce(metrics[name])
        metrics[name] /= dist.get_world_size()
    return metrics


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    out = reduce_metrics({"loss": torch.rand(1), "acc": torch.rand(1), "f1": torch.rand(1)})
    if dist.get_rank() == 0:
        print({k: v.item() for k, v in out.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
