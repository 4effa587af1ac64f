"""What a rank leaves behind while it lives, and how the parent reads it.

In the rank, loaded by their paths, run ``recorder``, ``group_watch``, ``roll``, and for its collectives ``recording``, ``wrapping``, ``groups``,
``sites``, ``flight``, ``answering``, ``ring``, and for its models ``digests``, ``checksums`` and ``sheets``; all other modules, and ``ring`` again, run in the parent. None imports torch.
"""
