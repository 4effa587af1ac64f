import os

import torch.distributed as dist


class FileIndex:
    def __init__(self, root):
        self.files = [None]
        if dist.get_rank() == 0:
            self.files = sorted(os.listdir(root))
        dist.broadcast_object_list(self.files, src=0)

    def __len__(self):
        return len(self.files)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(dist.get_rank(), len(FileIndex("/etc")))
    dist.destroy_process_group()
