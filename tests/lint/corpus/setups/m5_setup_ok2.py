import builtins

import torch
import torch.distributed as dist


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        if kwargs.pop("force", False) or is_master:
            builtin_print(*args, **kwargs)

    builtins.print = print


dist.init_process_group("gloo")
setup_for_distributed(dist.get_rank() == 0)
print("world", dist.get_world_size())
x = torch.ones(1)
dist.all_reduce(x)
print("done")
dist.destroy_process_group()
