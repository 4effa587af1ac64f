import torch
from accelerate import Accelerator
from transformers import get_cosine_schedule_with_warmup


def main(model, loader, epochs=3):
    accelerator = Accelerator()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    steps = epochs * len(loader)
    sched = accelerator.prepare(get_cosine_schedule_with_warmup(opt, 100, steps))
    for _ in range(epochs):
        for b in loader:
            accelerator.backward(model(**b).loss)
            opt.step()
            sched.step()
            opt.zero_grad()
