"""The golden files of the unit tests serve these too: `pytest tests/lint --update-golden` writes them anew."""

from __future__ import annotations

from unit.conftest import golden, pytest_addoption

__all__ = ["golden", "pytest_addoption"]
