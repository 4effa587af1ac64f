import deepspeed
import torch
import torch.distributed as dist

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


def main():
    deepspeed.init_distributed()
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    for step in range(1000):
        x = torch.randn(4, 256, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        if step % 200 == 0:
            if dist.get_rank() == 0:
                engine.save_checkpoint("checkpoints", tag=f"step{step}")
            dist.barrier()


if __name__ == "__main__":
    main()
