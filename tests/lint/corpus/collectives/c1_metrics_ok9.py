import torch
import torch.distributed as dist
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    acc, mean_loss = MulticlassAccuracy(num_classes=3), MeanMetric()
    for _ in range(5):
        logits, y = torch.randn(8, 3), torch.randint(0, 3, (8,))
        acc.update(logits, y)
        mean_loss.update(torch.nn.functional.cross_entropy(logits, y))
    results = {"acc": acc.compute(), "loss": mean_loss.compute()}
    if dist.get_rank() == 0:
        for name, value in results.items():
            print(f"{name}: {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
