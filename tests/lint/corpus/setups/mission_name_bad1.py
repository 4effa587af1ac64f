import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def load_train_objs():
    train_set = TensorDataset(torch.randn(2048, 20), torch.randn(2048, 1))
    model = torch.nn.Linear(20, 1)
    return train_set, model, torch.optim.SGD(model.parameters(), lr=1e-3)


def prepare_dataloader(dataset: Dataset, batch_size: int):
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(train_set))


def main():
    dist.init_process_group("gloo")
    dataset, model, opt = load_train_objs()
    loader = prepare_dataloader(dataset, 32)
    model = torch.nn.parallel.DistributedDataParallel(model)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
