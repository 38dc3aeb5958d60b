"""Real data-parallel ranks train at one clock for whole iterations."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import results_of

pytest.importorskip("torch")

TOP_MHZ = 1410


@pytest.mark.timeout(300)
def test_data_parallel_ranks_find_a_lower_clock_together_and_compute_the_same(tmp_path: Path):
    everyone = results_of("whole_programs:data_parallel", 2, tmp_path)
    for each in everyone:
        assert (each["equal"], each["after"], each["problem"], each["warnings"]) == (True, None, None, [])
        assert each["reference_s"] > 0.0
        assert min(filter(None, each["values"])) < TOP_MHZ
    # A value that ends soon may be seen on one rank alone, between two iterations of the other.
    low, high = sorted(len({*each["values"]}) for each in everyone)
    assert high - low <= 1
    differing = sum(one != other for one, other in zip(*(each["values"] for each in everyone), strict=True))
    assert differing <= len(everyone[0]["values"]) // 3
