import argparse
import torch
import torch.distributed as dist


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    ap.add_argument("--batch", type=int, default=16)
    return ap.parse_args()


def main(args):
    if args.local_rank != -1:
        torch.cuda.set_device(args.local_rank)
        dist.init_process_group("nccl")
    device = torch.device("cuda", max(args.local_rank, 0))
    net = torch.nn.Linear(4, 4).to(device)
    if args.local_rank != -1:
        net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[args.local_rank])
    net(torch.randn(args.batch, 4, device=device)).sum().backward()
    if args.local_rank != -1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(get_args())
