"""The load of a rehearsal, run as briefly as a test can."""

from __future__ import annotations

import pytest

from perseus_planner.profiler import rehearsal, row_meter


def shorten_load(patch: pytest.MonkeyPatch) -> None:
    """Run small matrix products in a few short windows; so do processes that are forked."""
    patch.setattr(rehearsal, "_WINDOW_S", 0.1)
    patch.setattr(row_meter, "_MAX_WINDOWS", 3)
    patch.setattr(row_meter, "_MAX_REJECTED", 0)
    patch.setattr(rehearsal, "_SIZES", {"cpu": 64})
