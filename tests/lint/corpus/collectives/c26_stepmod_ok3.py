import argparse

import torch
import torch.distributed as dist


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--log-every", type=int, default=10)
    p.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True)
    args = p.parse_args()
    dist.init_process_group("gloo")
    running = torch.zeros(1)
    for step in range(1, 31):
        running += torch.rand(1)
        if args.sync and step % args.log_every == 0:
            mean = running / args.log_every
            dist.all_reduce(mean)
            running.zero_()
            if dist.get_rank() == 0:
                print(step, mean.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
