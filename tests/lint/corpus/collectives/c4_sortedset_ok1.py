import torch
import torch.distributed as dist

dist.init_process_group("gloo")
metrics = {"loss": torch.rand(1), "acc": torch.rand(1)}
wanted = {"acc", "loss"}
for name in sorted(wanted & set(metrics)):
    dist.all_reduce(metrics[name])
    metrics[name] /= dist.get_world_size()
if dist.get_rank() == 0:
    print({k: v.item() for k, v in metrics.items()})
dist.destroy_process_group()
