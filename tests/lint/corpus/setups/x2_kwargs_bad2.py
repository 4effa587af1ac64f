import torch
import torch.distributed as dist
import torch.utils.data as data


def make_loader(ds, train, distributed):
    opts = {"batch_size": 8, "shuffle": True, "drop_last": True}
    if distributed:
        opts["sampler"] = data.DistributedSampler(ds, shuffle=train)
    return data.DataLoader(ds, **opts)


def main():
    dist.init_process_group("gloo")
    loader = make_loader(data.TensorDataset(torch.rand(64, 2)), True, True)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for (x,) in loader:
            t = x.mean(0)
            dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
