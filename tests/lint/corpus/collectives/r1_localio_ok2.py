import json

import torch
import torch.distributed as dist


def read_config(path):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError):
        return {"bias": 0.0}


def main():
    dist.init_process_group("gloo")
    cfg = read_config("/etc/does-not-exist.json")
    t = torch.tensor([cfg["bias"] + dist.get_rank()])
    dist.all_reduce(t)
    print(dist.get_rank(), t.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
