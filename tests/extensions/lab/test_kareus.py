"""Plans of Kareus, read as data."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from commands import done, loaded, refused
from strategies import smooth_profile

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.lab.kareus import KareusConfiguration, KareusPlan, read_kareus

PLAN = """[
[('forward', 1410), ('backward', 1410)],
[('forward', 1200), ('backward', 1410)],
]
# Iteration 7 cost change: 0.02
# Iteration 7 total cost: {cost}
# Iteration 7 total cost with P2P: {energy}
"""


def write(folder: Path, name: str, time_s: float, cost: float, text: str = PLAN) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(cost=cost, energy=cost + 2 * 100.0 * time_s))
    return path


def test_the_best_plan_at_each_time_whatever_its_mode(tmp_path: Path) -> None:
    write(tmp_path, "perseus/schedules/gpt/tp8/freqs_pipeline_9.py", 4.0, 50.0)
    write(tmp_path, "perseus/schedules/gpt/tp8/frontier/freqs_pipeline_1.py", 6.0, 20.0)
    write(tmp_path, "nanobatch/schedules/gpt/tp8/frontier/freqs_pipeline_1.py", 5.0, 30.0)
    slow = write(tmp_path, "nanobatch/schedules/gpt/tp8/frontier/freqs_pipeline_2.py", 5.5, 40.0)
    slow.with_name("scheds_pipeline_2.py").write_text(
        "[[('forward', 'a-1'), ('backward', 'b-2')], [('forward', 'a'), ('backward', 'b', 'c')]]"
    )
    (configuration,) = read_kareus(tmp_path, 100.0)
    assert configuration.name == "gpt/tp8"
    assert [plan.mode for plan in configuration.plans] == [
        "perseus", "nanobatch", "nanobatch", "perseus"
    ]  # fmt: skip
    assert [(plan.mode, plan.time_s) for plan in configuration.best] == [
        ("perseus", pytest.approx(4.0)),
        ("nanobatch", pytest.approx(5.0)),
        ("perseus", pytest.approx(6.0)),
    ]
    assert done(f"show {tmp_path} --blocking-power 100W") == f"{configuration.sheet.text()}\n"
    assert [line.split() for line in configuration.sheet.text().splitlines()[3:8]] == [
        ["mode", "time", "s", "energy", "J", "best"],
        ["perseus", "4.000", "850", "to", "5", "s"],
        ["nanobatch", "5.000", "1030", "to", "6", "s"],
        ["nanobatch", "5.500", "1140"],
        ["perseus", "6.000", "1220", "from", "there", "on"],
    ]


def test_a_report_has_a_section_for_each_configuration(folder: Path) -> None:
    for i in range(30):  # more than tables of a notebook show
        write(Path("kareus"), f"perseus/gpt/<tp{i // 26}>/freqs_pipeline_{i}.py", 4.0 + i, 50.0)
    smooth_profile(2).save("profile.yaml")
    power = "--blocking-power 100W"
    text = done(f"report kareus {power} -o alone.html")
    assert text.startswith(done(f"show kareus {power}").rstrip())
    beside = loaded(f"report profile.yaml kareus {power} -o beside.html")
    assert beside["kareus"] == loaded(f"show kareus {power}")["kareus"]
    for name in ("alone.html", "beside.html"):
        page = Path(name).read_text()
        assert '<h2 id="kareus-2">Plans of Kareus for gpt/&lt;tp1&gt;</h2>' in page
        assert page.count(">perseus<") == 30
        assert ("Time and energy of each computation" in page) == (name == "beside.html")
    assert "give it with --blocking-power, such as 85W" in refused("report kareus -o a.html")
    assert "needs a frontier" in refused(f"show kareus {power} --plot a.png --figure points")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__import__('os').mkdir('ran')\n# Iteration 7 total cost: {cost}", "not the literal of a"),
        ("[" * 5000, "it is not the literal of a list"),
        ("[[('forward', 1410), ('sideways', 1410)]]", "it is not a list of computations for each"),
        ("[[('forward', 'fast')]]\n", "a clock is not a whole number of MHz"),
        (PLAN.replace("with P2P", "without"), "its comments lack the total cost, or that with P2P"),
        (PLAN.replace("{energy}", "nan"), "its total costs give no iteration time"),
    ],
)
def test_what_is_no_plan_is_refused_and_never_run(
    text: str, problem: str, tmp_path: Path, folder: Path
) -> None:
    write(tmp_path, "perseus/a/freqs_pipeline_1.py", 1.0, 1.0, text)
    with pytest.raises(UsageError, match=problem):
        read_kareus(tmp_path, 85.0)
    assert not (folder / "ran").exists()


def test_what_is_missing_or_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "perseus/a/freqs_pipeline_1.py", 1.0, 1.0)
    with pytest.raises(UsageError, match="give it with --blocking-power, such as 85W"):
        read_kareus(tmp_path, None)
    path.with_name("scheds_pipeline_1.py").write_text("[[('forward', 'a')]]")
    with pytest.raises(UsageError, match="it has other computations than freqs_pipeline_1"):
        read_kareus(tmp_path, 85.0)
    with pytest.raises(UsageError, match="holds no freqs_pipeline"):
        read_kareus(tmp_path / "perseus" / "b", 85.0)


@pytest.fixture
def published() -> Path:
    """The folder that has Kareus' own plans, `tests` of its repository."""
    folder = os.environ.get("PLANNER_KAREUS")
    if folder is None:
        pytest.skip("PLANNER_KAREUS does not name the folder tests of Kareus' repository")
    return Path(folder)


def test_of_kareus_own_plans_the_better_mode_is_chosen_at_every_time(published: Path) -> None:
    """The one that its scripts except by hand included, which runs without nanobatching."""
    configurations = read_kareus(published, 85.0)
    assert len(configurations) == 10
    for configuration in configurations:
        plans = defaultdict[str, list[KareusPlan]](list)
        for plan in configuration.plans:
            plans[plan.mode].append(plan)
        assert min(map(len, plans.values())) >= 10
        moments = sorted(plan.time_s for each in plans.values() for plan in each)
        for at_s in [*moments, 2 * moments[-1]]:
            *_, best = (plan for plan in configuration.best if plan.time_s <= at_s)
            least = {
                mode: min((p.effective_j for p in each if p.time_s <= at_s), default=float("inf"))
                for mode, each in plans.items()
            }
            assert least[best.mode] == min(least.values())
    slower = [each.name for each in configurations if fastest(each) == "perseus"]
    assert slower == [
        "megatron_llama3.2_3b/cp2_tp4_mbs8_seq4096",
        "megatron_qwen3_1.7b/cp2_tp4_mbs8_seq4096",  # which its scripts except
    ]
    excepted = next(each for each in configurations if each.name == slower[1])
    assert {plan.mode for plan in excepted.best} == {"perseus"}


def fastest(configuration: KareusConfiguration) -> str:
    return configuration.plans[0].mode
