from datetime import timedelta

from accelerate import Accelerator, InitProcessGroupKwargs
from datasets import Dataset

acc = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))])
raw = Dataset.from_dict({"text": ["a b", "c"] * 100})
with acc.main_process_first():
    data = raw.map(lambda r: {"n": len(r["text"].split())})
acc.print(len(data))
acc.end_training()
