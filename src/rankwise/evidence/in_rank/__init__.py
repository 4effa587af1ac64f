"""What runs inside a rank. Each file stands alone: the hook loads it by its path into a Python that may have no rankwise.

``recorder`` notes how the rank ends. Once the script imports torch.distributed, ``instrument`` starts the others. ``ring`` is the layout
of the memory file that they write, and the reader uses it too.

What they hand to each other has the same name everywhere: ``load`` returns a module of ours by its name, ``ring`` is the module of that name,
``writer`` its ``RingWriter``, ``call_sites`` finds the user's lines, and ``module`` is torch.distributed.distributed_c10d.
"""
