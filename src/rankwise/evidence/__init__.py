"""What a rank leaves behind while it lives, and how the parent reads it.

``recorder`` runs in the rank; all other modules run in the parent, without torch.
"""
