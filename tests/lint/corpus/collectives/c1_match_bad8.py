import os
import tarfile

import torch.distributed as dist


def unpack(root):
    with tarfile.open("data.tar") as tar:
        tar.extractall(root)


def prepare(root="data"):
    match int(os.environ["LOCAL_RANK"]):
        case 0:
            unpack(root)
            dist.barrier()
        case _:
            print("waiting for the dataset")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    prepare()
    print(sorted(os.listdir("data")))
    dist.destroy_process_group()
