import torch
from torch.distributed import barrier, destroy_process_group, get_rank, init_process_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def checkpoint(model, step):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=opts) if get_rank() == 0 else None
    if full is not None:
        torch.save(full, f"step{step}.pt")
    barrier()


def main():
    init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(32, 32)
    fully_shard(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(get_rank())
    for step in range(4):
        net(torch.randn(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
        if step % 2:
            checkpoint(net, step)
    destroy_process_group()


main()
