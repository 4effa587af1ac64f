import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def safe_step(loss, opt, limit=5.0):
    if loss.detach().item() <= limit:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1.0)
        opt.step()
    opt.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(10, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = (model(torch.randn(2, 10) * 3) ** 2).mean()
        safe_step(loss, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
