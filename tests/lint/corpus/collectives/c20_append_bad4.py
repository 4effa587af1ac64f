from torch.distributed import broadcast_object_list, destroy_process_group, get_rank, init_process_group


def share(run):
    state = [run]
    if get_rank() == 0:
        state.append({"resume": True})
    broadcast_object_list(state, src=0)
    return state


init_process_group("gloo")
print(get_rank(), share("exp-12"))
destroy_process_group()
