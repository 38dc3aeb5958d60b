"""What all commands share: sections of the help, endings of files, questions for misspelled
names, completion.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from click import Context
from click.shell_completion import BashComplete
from commands import done, loaded, refusal
from strategies import smooth_profile

from perseus_planner import Frontier, Plan, Profile
from perseus_planner.base.errors import UsageError, did_you_mean, how_to_install
from perseus_planner.cli import main
from perseus_planner.cli.console import is_json
from perseus_planner.cli.options import Counts, Lag, Option, command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))


def test_every_command_is_in_one_section_of_the_help_with_its_whole_summary():
    names = [name for section in main.sections.values() for name in section]
    assert sorted(names) == sorted(main.commands)
    text = done("--help")
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *main.sections]
    assert "..." not in text.partition("Options:")[2]
    assert done("help").partition("\n")[2] == text.partition("\n")[2]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("1F1B", "did you mean 1f1b?"),
        ("inter", "did you mean interleaved-1f1b or interleaved-zb?"),
        ("zb", "did you mean zb-h1?"),
        ("gipe", "did you mean gpipe?"),
        ("nothing", None),
        ("", None),
    ],
)
def test_a_name_that_differs_by_case_an_end_or_a_letter_is_asked_for(
    text: str, question: str | None
):
    assert (
        did_you_mean(text, ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb"))
        == question
    )


@pytest.mark.needs("explore", "service")
@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("slove profile.yaml", "Error: No such command 'slove'; did you mean solve?\n"),
        (
            "status --service http://127.0.0.1:1",
            "Error: there is no answer from the service at http://127.0.0.1:1 (Connection "
            "refused); start it with `planner serve`, or name another in PLANNER_SERVICE or "
            "--service\n",
        ),
        (
            "/",
            "Error: No such command '/'; to look at a file of the planner, write `planner show "
            "/`\n",
        ),
        (
            "estimate --model GPT3-1.3B --gpu a40 --stages 4 -o e.yaml",
            "Error: model 'GPT3-1.3B': there is no such model; did you mean gpt3-1.3b?\n",
        ),
        (
            "profile --gpu simulated:A100 --stages 2 -o p.yaml",
            "Error: GPU 'simulated:A100': there is no simulated GPU 'A100'; "
            "did you mean simulated:a100-pcie or simulated:a100-sxm?\n",
        ),
        (
            "profile --gpu simulated:a40 --stages 2 -o p.txt",
            "Error: --output p.txt: must end in .yaml or .yml; rename it\n",
        ),
        (
            "plan frontier.npz --time 4s -o p.yaml",
            "Error: No such option '--time'. Did you mean '--deadline'?\n",
        ),
        ("solve p.yaml -o f.yaml", "Error: --output f.yaml: must end in .npz; rename it\n"),
        ("report p.yaml -o r.pdf", "Error: --output r.pdf: must end in .html or .htm; rename it\n"),
        (
            "profile --gpu A100-SXM --stages 2 -o p.yaml",
            "Error: GPU 'A100-SXM': there is no back-end 'A100-SXM'; did you mean "
            "simulated:a100-sxm?\n",
        ),
        (
            "show notes.txt",
            "Error: notes.txt: is not a file of the planner; name a profile, a frontier, a plan or "
            "a run folder\n",
        ),
        (
            "doctor cuda:",
            "Error: cuda: the number of the GPU is missing; write cuda:0, or run `planner doctor "
            "cuda` to see all\n",
        ),
    ],
)
def test_what_is_nearly_right_is_refused_with_what_is_right(line: str, end: str):
    Path("notes.txt").write_text("- a\n")
    code, out, error = refusal(line)
    assert (code, out) == (2, "")
    assert error.endswith(end)


def test_the_table_of_a_profile_is_shown_with_the_power_beside_it_or_without():
    smooth_profile(2).save("profile.yaml")
    assert done("show profile.csv") == done("show profile.yaml")
    Path("profile.yaml").rename("elsewhere.txt")
    assert "; blocking power not known\n" in done("show profile.csv")
    assert loaded("show profile.csv")["context"]["blocking_power_w"] is None


def test_a_job_file_alone_is_profiled_solved_and_planned():
    Path("job.yaml").write_text(
        "format: perseus-planner/job\nversion: 1\ngpu: simulated:a100-sxm\nstages: 2\nprofile: "
        "measured.yaml\n"
        "schedule: 1f1b\nmicrobatches: 4\n"
    )
    assert done("job.yaml").endswith("train with planner_runtime(engine, plan='plan.yaml')\n")
    frontier = Frontier.load("frontier.npz")
    assert frontier.profile.digest == Profile.load("measured.yaml").digest
    assert Plan.load("plan.yaml") == frontier.plan_for(frontier.baseline_time_s)
    before = Path("measured.yaml").stat().st_mtime_ns
    said = done("job.yaml --slowdown 1.1 --max-changes 2")
    assert said.startswith("measured.yaml exists; remove it to measure again\n")
    assert Path("measured.yaml").stat().st_mtime_ns == before
    assert Plan.load("plan.yaml") == frontier.plan_for(
        1.1 * frontier.baseline_time_s, max_changes=2
    )


def test_a_job_file_with_unlike_replicas_is_planned_for_each_kind():
    Path("job.yaml").write_text(
        "format: perseus-planner/job\nversion: 1\ngpu: simulated:a100-sxm\nstages: 2\nprofile: "
        "measured.yaml\n"
        "schedule: 1f1b\nmicrobatches: 4\nreplicas:\n- count: 3\n"
        "- {count: 1, slow_stages: {1: 1.15}}\n"
    )
    said = done("job.yaml")
    assert "\nplanner plan frontier-0.npz frontier-1.npz --replicas 3,1 --slowdown 1.00 " in said
    assert "Wrote plan-0.yaml, for 3 pipelines\nWrote plan-1.yaml, for 1 pipeline\n" in said
    assert "planner_runtime(engine, plan={0: 'plan-0.yaml', ...})" in said
    by_hand = "plan frontier-0.npz frontier-1.npz --replicas 3,1 --slowdown 1.00 -o by-hand.yaml"
    done(by_hand)
    for kind in (0, 1):
        assert Plan.load(f"plan-{kind}.yaml") == Plan.load(f"by-hand-{kind}.yaml")


@pytest.mark.needs("explore")
@pytest.mark.parametrize(
    ("words", "last", "found"),
    [
        (["solve", "--schedule"], "interleaved", ["interleaved-1f1b", "interleaved-zb"]),
        (["estimate", "--model"], "llama3-8", ["llama3-8b"]),
        (["explore", "gpt3-1.3b", "--gpu"], "h1", ["h100-sxm", "h100-nvl"]),
        (["profile", "--gpu"], "simulated:a4", ["simulated:a40"]),
    ],
)
def test_values_are_completed(words: list[str], last: str, found: list[str]):
    completions = BashComplete(main, {}, "planner", "_PLANNER_COMPLETE").get_completions(
        words, last
    )
    assert [each.value for each in completions] == found


def test_only_extras_that_exist_are_named_to_install():
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(
        r"^([a-z]+) = \[", pyproject.partition("[project.optional-dependencies]")[2], re.MULTILINE
    )
    named = set()
    for file in (
        path
        for folder in ("perseus_planner", "profiler", "runtime")
        for path in (ROOT / folder).rglob("*.py")
    ):
        text = file.read_text()
        # `compiling` names a compiler, which is no extra.
        assert "pip install" not in text or file.name in ("errors.py", "compiling.py"), file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "how_to_install":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant)
                named.add(argument.value)
    assert named
    assert named <= set(extras)
    assert how_to_install("plot") == "run `pip install '.[plot]'` in your clone of perseus-planner"


@dataclass(frozen=True)
class Sizes:
    """Options of the command below."""

    most_s: Annotated[Lag | None, "The longest."]
    counts: Annotated[Counts, "How many.", Option(default="1,2")]


def test_parameters_and_fields_are_options_by_their_types():
    given = []

    @command("planner tried a --kind y")
    def tried(
        files: tuple[Path, ...],
        *,
        sizes: Sizes,
        kind: Annotated[Literal["x", "y"], "Which."] = "x",
        names: Annotated[tuple[str, ...], "Who.", Option("--name")],
    ) -> None:
        """Try it."""
        given.append((files, sizes, kind, names, is_json()))

    tried.main(
        ["a", "b", "--most", "3ms", "--name", "n", "--name", "m", "--json"], standalone_mode=False
    )
    tried.main(["--kind", "y", "--counts", "3"], standalone_mode=False)
    assert given == [
        ((Path("a"), Path("b")), Sizes(0.003, (1, 2)), "x", ("n", "m"), True),
        ((), Sizes(None, (3,)), "y", (), False),
    ]
    with pytest.raises(UsageError, match=r"^--most: 'soon' is not a duration: "):
        tried.main(["--most", "soon"], standalone_mode=False)
    helped = tried.get_help(Context(tried, info_name="tried"))
    assert [" ".join(line.split()) for line in helped.splitlines()[5:10]] == [
        "--most TIME The longest.",
        "--counts N,N,… How many. [default: 1,2]",
        "--kind [x|y] Which. [default: x]",
        "--name TEXT Who.",
        "--json Print one JSON object, in SI units, instead of text.",
    ]
