import torch
import torch.distributed as dist


class Comm:
    def __init__(self, backend):
        self.backend = backend

    def init(self):
        dist.init_process_group(self.backend)
        return self

    def close(self):
        dist.destroy_process_group()


def wrap(f, **kw):
    return f(**kw)


c = Comm("gloo").init()
x = wrap(torch.ones, size=(2,))
dist.all_reduce(x)
c.close()
