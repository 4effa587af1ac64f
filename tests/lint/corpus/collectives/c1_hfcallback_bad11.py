import torch.distributed as dist
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class LengthStats(TrainerCallback):
    """Keeps the sequence lengths of the epoch and writes a histogram."""

    def __init__(self):
        self.lengths = []

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            everyone = [None] * args.world_size
            dist.all_gather_object(everyone, self.lengths)
            merged = sorted(n for part in everyone for n in part)
            print("median length", merged[len(merged) // 2] if merged else 0)
        self.lengths.clear()


def main():
    tok = AutoTokenizer.from_pretrained("distilbert-base-uncased")
    ds = load_dataset("imdb", split="train[:1%]")
    ds = ds.map(lambda b: tok(b["text"], truncation=True, padding="max_length"), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased")
    args = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=1)
    Trainer(model=model, args=args, train_dataset=ds, callbacks=[LengthStats()]).train()


if __name__ == "__main__":
    main()
