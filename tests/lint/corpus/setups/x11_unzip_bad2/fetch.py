import os
import tarfile
import urllib.request


def prepare(url, root):
    os.makedirs(root, exist_ok=True)
    archive = os.path.join(root, os.path.basename(url))
    if not os.path.exists(archive):
        urllib.request.urlretrieve(url, archive)
    with tarfile.open(archive) as t:
        t.extractall(root)
    return root
