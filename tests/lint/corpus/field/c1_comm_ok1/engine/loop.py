import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from . import comm


class Loop:
    def __init__(self):
        gpu = int(os.environ["LOCAL_RANK"])
        self.model = torch.nn.Linear(4, 2).cuda(gpu)
        if comm.get_world_size() > 1:
            self.model = DDP(self.model, device_ids=[gpu], broadcast_buffers=False)
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)

    def fit(self):
        for i in range(10):
            out = self.model(torch.randn(4, 4).cuda())
            losses = {"a": out.mean(), "b": out.pow(2).mean()}
            reduced = comm.reduce_dict({k: v.detach() for k, v in losses.items()})
            if comm.is_main_process():
                print({k: v.item() for k, v in reduced.items()})
            self.opt.zero_grad()
            sum(losses.values()).backward()
            self.opt.step()
            comm.synchronize()
        self.inference()

    def inference(self):
        self.model.eval()
        with torch.no_grad():
            p = self.model(torch.randn(4, 4).cuda()).cpu()
        everything = comm.all_gather(p)
        comm.synchronize()
        if not comm.is_main_process():
            return {}
        print(len(everything))
        return {"n": len(everything)}
