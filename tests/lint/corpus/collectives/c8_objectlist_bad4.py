import torch.distributed as dist


def share_config(cfg):
    me = dist.get_rank()
    owner = me if cfg.get("leader") else 0
    payload = [cfg]
    dist.broadcast_object_list(payload, src=owner)
    return payload[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mine = {"lr": 0.1, "leader": dist.get_rank() == 1}
    print(share_config(mine))
    dist.destroy_process_group()
