"""What the README tells users to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from click.testing import CliRunner
from made_runs import write_run

from perseus_planner import Plan
from perseus_planner.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_five_minutes_and_then_the_python_examples_run_as_written(folder: Path):
    (job,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (folder / "job.yaml").write_text(job)
    commands = re.findall(r"^ +planner (.*)$", README, re.MULTILINE)
    assert {command.split()[0] for command in commands} == set(main.commands)
    for command in commands:
        if command.startswith("show run"):  # what training would have written
            write_run(folder / "run", Plan.load("plan.yaml"), 3)
        result = CliRunner().invoke(main, shlex.split(command, comments=True))
        assert (result.exit_code, result.stderr) == (0, ""), command
    (folder / "plan.yaml").unlink()
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)
    assert (folder / "plan.yaml").exists()
