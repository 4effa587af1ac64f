import torch
import torch.distributed as dist


class T:
    def __init__(self):
        dist.init_process_group("gloo")
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))

    def save(self, p):
        if dist.get_rank() == 0:
            torch.save({"state_dict": self.model.state_dict()}, p)
        dist.barrier()

    def warm_start(self, p):
        net = torch.nn.Linear(4, 2)
        ck = torch.load(p, map_location="cpu")
        net.load_state_dict(ck["state_dict"], strict=False)
        return net


t = T()
t.save("ws.pt")
t.warm_start("ws.pt")
dist.destroy_process_group()
