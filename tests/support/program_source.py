"""A source of programs for a hook."""

from __future__ import annotations

from perseus_planner.runtime.program import Program


class Source:
    """A source of programs that a test changes."""

    def __init__(self, program: Program | None) -> None:
        self.program = program

    def program_for(self, _: int) -> Program | None:
        return self.program

    def on_end(self, *_: object) -> None:
        pass
