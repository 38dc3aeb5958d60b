"""How a rank begins: what it refuses before it meets the others."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_planner.base.errors import UsageError
from perseus_planner.runtime.joining import _begun
from perseus_planner.runtime.options import Options


@pytest.mark.parametrize("follow", ["time", "graph"])
def test_without_a_plan_there_is_none_to_follow(follow: Any):
    with pytest.raises(UsageError, match=f"^follow='{follow}': there is no plan to follow; give"):
        _begun(Options(follow=follow), None)
