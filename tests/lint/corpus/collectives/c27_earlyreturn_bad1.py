import torch
import torch.distributed as dist


def evaluate(samples):
    if len(samples) == 0:
        return 0.0
    score = torch.stack(samples).mean().reshape(1)
    dist.all_reduce(score)
    return score.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = [torch.rand(1) for _ in range(1)][rank::world]
    print(rank, evaluate(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
