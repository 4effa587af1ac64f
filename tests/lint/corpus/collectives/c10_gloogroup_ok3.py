import argparse

import torch
import torch.distributed as dist


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cpu-metrics", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    metrics_group = None
    if args.cpu_metrics:
        metrics_group = dist.new_group(backend="gloo")
    t = torch.ones(1)
    dist.all_reduce(t, group=metrics_group)
    if dist.get_rank() == 0:
        print("world", int(t))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
