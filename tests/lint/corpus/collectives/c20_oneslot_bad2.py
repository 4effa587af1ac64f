import time
from torch import distributed as td


def agree(cfg):
    box = [cfg, time.time()] if td.get_rank() == 0 else [None]
    td.broadcast_object_list(box, src=0)
    return box


def main():
    td.init_process_group("gloo")
    print(td.get_rank(), agree({"seed": 1}))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
