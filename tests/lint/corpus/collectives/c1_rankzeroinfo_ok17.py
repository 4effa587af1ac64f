import functools
import os

import torch
import torch.distributed as dist


def rank_zero_only(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        if int(os.environ.get("RANK", "0")) == 0:
            return fn(*args, **kwargs)

    return inner


@rank_zero_only
def log(msg, *values):
    print(msg.format(*values), flush=True)


@rank_zero_only
def save(t, path):
    torch.save(t, path)


def main():
    dist.init_process_group("gloo")
    t = torch.ones(3)
    dist.all_reduce(t)
    log("sum {}", t.tolist())
    save(t, "/tmp/rank_zero_sum.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
