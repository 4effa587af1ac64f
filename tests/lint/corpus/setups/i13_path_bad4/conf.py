import os

WORLD = 2
CACHE = os.path.join("/tmp", "recsys")
os.makedirs(CACHE, exist_ok=True)
SYNC_FILE = os.path.join(CACHE, "pg_init")
