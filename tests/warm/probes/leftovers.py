# ruff: noqa: ANN001, ANN201, ANN204
"""A script that leaves much for the interpreter to take apart at its exit."""

import atexit
import gc
import sys
import threading

import torch


class Node:
    """Tells of its end."""

    def __init__(self, name, other=None):
        self.name, self.other, self.me = name, other, None

    def __del__(self):
        print("del", self.name)


def make_function():
    kept = Node("in a closure")
    return lambda: kept


class Holder:
    node = Node("of a class")


alone = Node("of the module")
pair = Node("in a pair")
pair.other = Node("its other", pair)
itself = Node("itself")
itself.me = itself
listed = [Node("in a list")]
listed.append(listed)
function = make_function()
model = torch.nn.Linear(2, 2)
model.node = Node("of a model")
model.register_forward_hook(lambda *_: model)
local = threading.local()
local.node = Node("of a thread")
collected = Node("collected")
collected.me = collected
del collected
print(gc.collect() > 0, gc.isenabled(), gc.get_threshold())
generator = (node for node in [Node("in a generator")])
next(generator)
atexit.register(print, "registered first")
atexit.register(print, "registered last")
sys.exit(0)
