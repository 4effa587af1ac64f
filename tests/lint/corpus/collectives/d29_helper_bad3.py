import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh


def configure_optimizer(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = configure_optimizer(model)
    model = parallelize(model, mesh)
    for _ in range(10):
        model(torch.randn(4, 32)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
