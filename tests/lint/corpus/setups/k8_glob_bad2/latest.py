import glob
import os


def find_latest(folder):
    files = glob.glob(os.path.join(folder, "step_*.pt"))
    return max(files, key=os.path.getmtime) if files else None
