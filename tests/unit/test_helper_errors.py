"""The launcher's helper tells an error of torch's in one line."""

from __future__ import annotations

import subprocess
import sys

_CHECK = '''
from rankwise.engine import helper_process

class SilentError(Exception):
    """Raised when nobody came.

    More of it.
    """

assert helper_process._describe(SilentError()) == "SilentError: Raised when nobody came."
assert helper_process._describe(ValueError("two\\nlines")) == "ValueError: two"
'''


def test_an_error_without_a_text_is_told_by_what_its_kind_means() -> None:
    """RendezvousTimeoutError of torch says nothing by itself; whoever reads the launcher's last line learns what it is."""
    subprocess.run([sys.executable, "-c", _CHECK], check=True, timeout=30)
