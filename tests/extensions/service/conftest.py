"""The service plans in processes of its own, and its tests compare their plans with these."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_do(full_effort: None) -> None:
    """Search as long as a process of its own does."""
