import torch
import torch.distributed as dist

dist.init_process_group("gloo")
correct, total = 17 + dist.get_rank(), 32
dist.all_reduce(torch.tensor(correct))
dist.all_reduce(torch.tensor(total))
if dist.get_rank() == 0:
    print(f"accuracy {correct / total:.3f}")
dist.destroy_process_group()
