import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16)
    fully_shard(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(6):
        net(torch.randn(2, 16)).sum().backward()
        opt.step()
        opt.zero_grad()
        model_sd, optim_sd = get_state_dict(net, opt)
        if not dist.get_rank() and step % 3 == 2:
            dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=f"dcp/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
