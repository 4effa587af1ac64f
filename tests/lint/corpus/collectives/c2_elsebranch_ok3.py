import time

import torch.distributed as dist

dist.init_process_group("gloo")

if dist.get_rank() == 0:
    print("compiling kernels")
    time.sleep(0.2)
    dist.barrier()
else:
    dist.barrier()

print(dist.get_rank(), "go")
dist.destroy_process_group()
