import click
import torch
import torch.distributed as dist


@click.command()
@click.option("--local_rank", type=int, default=0)
@click.option("--steps", type=int, default=10)
def main(local_rank, steps):
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    t = torch.zeros(1).cuda()
    for _ in range(steps):
        dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
