import functools

import torch.distributed as dist


def on_main_then_share(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        result = [fn(*args, **kwargs) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(result, src=0)
        return result[0]

    return call


@on_main_then_share
def scan_folder(root):
    import os

    return sorted(os.listdir(root))


def main():
    dist.init_process_group("gloo")
    files = scan_folder("/etc")
    if dist.get_rank() == 0:
        print(len(files), "files")
    dist.destroy_process_group()


main()
