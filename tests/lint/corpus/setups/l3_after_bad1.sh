#!/bin/bash
cd "$HOME/project"
torchrun train.py --nproc_per_node=8 --lr 0.01
