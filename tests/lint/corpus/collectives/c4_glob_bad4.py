import glob

import torch
import torch.distributed as td


def share_shards(folder):
    shards = {}
    for path in glob.glob(f"{folder}/*.pt"):
        box = [torch.load(path, map_location="cpu", weights_only=True) if td.get_rank() == 0 else None]
        td.broadcast_object_list(box, src=0)
        shards[path] = box[0]
    return shards


def main():
    td.init_process_group("gloo")
    shards = share_shards("embeddings")
    print(len(shards), "shards")
    td.destroy_process_group()


if __name__ == "__main__":
    main()
