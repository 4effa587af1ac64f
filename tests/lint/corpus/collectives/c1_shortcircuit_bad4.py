import torch
from torch import distributed as td
from torch.distributed import all_reduce as ar


def any_overflow(grads):
    flag = torch.zeros(1)
    for g in grads:
        if not torch.isfinite(g).all():
            flag += 1
    ar(flag, op=td.ReduceOp.MAX)
    return bool(flag.item())


def main():
    td.init_process_group("gloo")
    is_main = td.get_rank() == 0
    torch.manual_seed(td.get_rank())
    for it in range(20):
        grads = [torch.randn(4), torch.randn(3)]
        if is_main and any_overflow(grads):
            print("overflow at", it)
    td.barrier()
    td.destroy_process_group()


main()
