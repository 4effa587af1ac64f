import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    fully_shard(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        net(torch.randn(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, "/tmp/fsdp2_final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
