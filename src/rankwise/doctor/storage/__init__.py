"""File systems: which one a folder is on, and what it can do."""
