import random

import numpy as np
import torch


def fix_seeds(seed, rank):
    for f in (random.seed, np.random.seed, torch.manual_seed):
        f(seed + rank)
