import time

import torch.distributed as dist


def agree_on_run_name():
    box = [None]
    if dist.get_rank() != 0:
        dist.broadcast_object_list(box, src=0)
        return box[0]
    box[0] = time.strftime("run-%Y%m%d-%H%M%S")
    dist.broadcast_object_list(box, src=0)
    print("logging to", box[0])
    return box[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    name = agree_on_run_name()
    print(dist.get_rank(), name)
    dist.destroy_process_group()
