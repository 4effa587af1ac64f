python train.py -m torch.distributed.launch --nproc_per_node=4 --config base.yaml
