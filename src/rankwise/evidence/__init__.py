"""What a rank leaves behind while it lives, and how the parent reads it.

In the rank, loaded by their paths, run ``recorder``, ``group_watch``, ``roll``; for its collectives ``beginning``, ``recording``, ``forms``, ``parcels``, ``stages``,
``wrapping``, ``groups``, ``sites``, ``flight``, ``answering``, ``handling``, ``dispatching``, ``ring``; for its models ``digests``, ``checksums``, ``sheets``; and ``keeping`` where no
launcher of ours looks on. All other modules, and ``ring`` again, run in the parent. None imports torch.
"""
