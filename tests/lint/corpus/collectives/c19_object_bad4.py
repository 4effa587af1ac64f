import os
import socket

import torch.distributed as dist


def inventory():
    hosts = [None] * dist.get_world_size()
    dist.gather_object((socket.gethostname(), os.getpid()), object_gather_list=hosts, dst=0)
    if dist.get_rank() == 0:
        for rank, host in enumerate(hosts):
            print(rank, *host)


def main():
    dist.init_process_group("gloo")
    inventory()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
