import math

import torch
from accelerate import Accelerator


def evaluate(accelerator, model, batches):
    losses = []
    for ids, labels in batches:
        with torch.no_grad():
            logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        losses.append(accelerator.gather(loss.reshape(1)))
    mean = torch.cat(losses).mean()
    return math.exp(mean)


if __name__ == "__main__":
    acc = Accelerator(cpu=True)
    net = acc.prepare(torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)))
    data = []
    for _ in range(4):
        ids = torch.randint(0, 100, (2, 32))
        labels = ids.clone()
        labels[:, torch.randint(4, 32, ()).item() :] = -100
        data.append((ids, labels))
    acc.print("ppl", evaluate(acc, net, data))
    acc.end_training()
