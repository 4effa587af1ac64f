import os

import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    box = [sorted(os.listdir("/etc")) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    print(dist.get_rank(), len(box[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
