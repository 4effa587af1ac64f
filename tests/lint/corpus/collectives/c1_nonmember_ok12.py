import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    spare = dist.new_group([0])
    t = torch.ones(1)
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(t, group=group)
    if dist.get_rank(spare) >= 0:
        dist.all_reduce(t, group=spare)
        print("sum", t.item())
    dist.destroy_process_group()


main()
