from accelerate import Accelerator
from datasets import load_dataset
from transformers import AutoTokenizer


def main():
    accelerator = Accelerator()
    tok = AutoTokenizer.from_pretrained("bert-base-uncased")
    raw = load_dataset("bookcorpus", split="train")
    with accelerator.main_process_first():
        data = raw.map(lambda b: tok(b["text"], truncation=True), batched=True)
    accelerator.print(len(data))
    accelerator.end_training()


if __name__ == "__main__":
    main()
