import os
import uuid

import torch
from torch import distributed as td


class Run:
    def __init__(self):
        td.init_process_group("nccl")
        self.local_rank = int(os.environ["LOCAL_RANK"])
        box = [uuid.uuid4().hex if td.get_rank() == 0 else None]
        td.broadcast_object_list(box, src=0)
        self.id = box[0]
        td.barrier()
        torch.cuda.set_device(self.local_rank)
        self.model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(4, 4).cuda(), device_ids=[self.local_rank]
        )


if __name__ == "__main__":
    print(Run().id)
    td.destroy_process_group()
