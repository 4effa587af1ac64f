import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass
class Config:
    root: str = "/scratch/exps"
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def out(self):
        return Path(self.root) / self.run_id


def main():
    dist.init_process_group("gloo")
    cfg = Config()
    cfg.out.mkdir(parents=True, exist_ok=True)
    part = torch.rand(10)
    torch.save(part, cfg.out / f"part{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        all_parts = [torch.load(cfg.out / f"part{r}.pt") for r in range(dist.get_world_size())]
        torch.save(torch.cat(all_parts), cfg.out / "all.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
