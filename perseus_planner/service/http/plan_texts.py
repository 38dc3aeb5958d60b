"""The plans of a job as the JSON that is sent: made once for all who ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from perseus_planner.service.outcomes import PlanSet


_KEPT = 256  # of 30 kB where there are 8 stages and 96 microbatches


@dataclass(frozen=True)
class PlanTexts:
    """One version of the plans of a job.

    Attributes:
        version: which one.
        texts: `Plan.dumps` of each plan that differs from the others, as JSON strings.
        of_pipeline: which of `texts` each pipeline has.
    """

    version: int
    texts: tuple[bytes, ...]
    of_pipeline: tuple[int, ...]

    @classmethod
    def of(cls, plans: PlanSet) -> PlanTexts:
        """Those of a set of plans."""
        return cls(plans.version, tuple(map(_quoted, plans.texts)), plans.of_pipeline)

    def of_one(self, pipeline: int) -> bytes:
        """The answer about one pipeline.

        Raises:
            HTTPException: 404, the job has no such pipeline.
        """
        if pipeline >= len(self.of_pipeline):
            last = len(self.of_pipeline) - 1
            raise HTTPException(404, f"the job has no pipeline {pipeline}: they are numbered from 0 to {last}")
        text = self.texts[self.of_pipeline[pipeline]]
        return b'{"version":%d,"pipeline":%d,"plan":%b}' % (self.version, pipeline, text)

    def of_all(self) -> bytes:
        """The answer about all pipelines."""
        indices = json.dumps(self.of_pipeline, separators=(",", ":")).encode()
        return b'{"version":%d,"plans":[%b],"of_pipeline":%b}' % (self.version, b",".join(self.texts), indices)


@lru_cache(_KEPT)
def _quoted(text: str) -> bytes:
    """A plan as a JSON string; jobs that are alike have the same plans."""
    return json.dumps(text).encode()
