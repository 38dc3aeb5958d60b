"""How a rank begins: what it refuses before it meets the others, and what it is told of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.runtime.attachment import NodeController
from perseus_planner.runtime.job import NodeState, Refusal
from perseus_planner.runtime.joining import _begun
from perseus_planner.runtime.options import Options


@pytest.mark.parametrize("follow", ["time", "graph"])
def test_without_a_plan_there_is_none_to_follow(follow: Any):
    with pytest.raises(UsageError, match=f"^follow='{follow}': there is no plan to follow; give"):
        _begun(Options(follow=follow), None)


def test_a_controller_that_is_not_started_as_another_rank_refuses_says_so():
    """It said that 60 s had passed."""
    state = NodeState(refusal=Refusal(0, "its plan has other stages"))
    node = SimpleNamespace(leads=False, state=state, look=lambda: state)
    with pytest.raises(GpuError, match="was not started: rank 0 does not begin: its plan has"):
        NodeController(1, cast("Any", node), 2, 100.0).first_address()
