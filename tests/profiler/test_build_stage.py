"""Profile stages that a user's function builds; errors in it are reported in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import EXAMPLES, ranks

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.build import StageBuilder, profile_stages
from perseus_planner.profiler.ranks.group import RankPosition
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiles.profiles import Profile

torch = pytest.importorskip("torch")

QUIET = "simulated:a100-sxm?noise=0&drift=0&step=0"
OBSERVED = SweepSettings(control="observed")
WHOLE = """
import torch

def build_stage(stage, stages):
    return torch.nn.Linear(8, 8), torch.randn(2, 8), None

def with_all(**arguments):
    print(sorted(arguments.items()))
    return build_stage(0, 1)

def two():
    return torch.nn.Linear(8, 8), None

def nothing():
    pass

def inner():
    raise ValueError("no such layer\\nand more")

def failing():
    inner()

def of_torch():
    torch.zeros(2) @ torch.zeros(3)

constant = 3
"""


@pytest.fixture
def own(folder: Path) -> Iterator[Path]:
    """The current folder, with a module `own` in it."""
    path, modules = list(sys.path), set(sys.modules)
    (folder / "own.py").write_text(WHOLE)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("own", "broken", "gpt", "stages")):
            del sys.modules[name]


def refusal(text: str, position: RankPosition | None = None) -> str:
    with pytest.raises(UsageError) as error:
        StageBuilder.load(text).build(position or RankPosition(0, 2))
    return str(error.value)


def test_a_function_gets_the_arguments_that_it_takes(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, inputs, loss = StageBuilder.load("own:build_stage").build(RankPosition(1, 2))
    assert isinstance(module, torch.nn.Linear)
    assert (tuple(inputs.shape), loss) == ((2, 8), None)
    StageBuilder.load("own:with_all").build(RankPosition(1, 2, 3, 4))
    assert (
        capsys.readouterr().out
        == "[('stage', 1), ('stages', 2), ('tensor_parallel', 4), ('tensor_rank', 3)]\n"
    )


def test_a_text_that_names_no_function_is_refused(own: Path) -> None:
    for text in ("own", "own:", ":build_stage"):
        assert refusal(text) == f"{text!r} does not name a function; write package.module:function"
    assert refusal("own_stages:build") == (
        f"function 'own_stages:build': there is no module 'own_stages' in {own} or on sys.path"
    )
    assert (
        refusal("own:build")
        == "function 'own:build': own has no function 'build'; define it, or name another"
    )
    assert (
        refusal("own:constant")
        == "function 'own:constant': own has no function 'constant'; define it, or name another"
    )


def test_a_module_that_cannot_be_imported_is_refused_with_its_line(own: Path) -> None:
    for content, message in (
        ("import not_there", ":1: ModuleNotFoundError: No module named 'not_there'"),
        ("\n1 / 0", ":2: ZeroDivisionError: division by zero"),
        ("def (", ":1: SyntaxError: "),
    ):
        (own / "broken.py").write_text(content)
        sys.modules.pop("broken", None)
        text = refusal("broken:build")
        assert text.startswith(
            f"function 'broken:build': importing broken failed: {own / 'broken.py'}{message}"
        ), text


def test_a_function_that_raises_is_refused_with_its_line(own: Path) -> None:
    line = WHOLE.splitlines().index('    raise ValueError("no such layer\\nand more")') + 1
    where = f"own:failing for stage 0 of 2 failed: {own / 'own.py'}:{line}"
    assert refusal("own:failing") == f"{where}: ValueError: no such layer"
    assert refusal("own:of_torch").startswith(
        f"own:of_torch for stage 0 of 2 failed: {own / 'own.py'}:{line + 6}: "
    )


def test_a_function_that_returns_something_else_is_refused(own: Path) -> None:
    wanted = (
        "return a torch module, a sample input of one microbatch, and the loss of the last "
        "stage or None"
    )
    assert refusal("own:two") == f"own:two for stage 0 of 2 returned Linear, NoneType; {wanted}"
    assert (
        refusal("own:nothing", RankPosition(1, 3))
        == f"own:nothing for stage 1 of 3 returned NoneType; {wanted}"
    )


def test_a_module_is_found_in_the_given_folder_before_the_current_one(own: Path) -> None:
    beside = own / "beside"
    beside.mkdir()
    (beside / "own_twin.py").write_text("def build_stage(): return 'beside'")
    (own / "own_twin.py").write_text("def build_stage(): return 'here'")
    assert StageBuilder.load("own_twin:build_stage", beside).function() == "beside"
    with pytest.raises(UsageError) as error:
        StageBuilder.load("own_stages:build", beside)
    assert str(error.value) == (
        f"function 'own_stages:build': there is no module 'own_stages' in {beside}, in {own} or on "
        "sys.path"
    )


def test_the_examples_stages_are_profiled_in_one_process(own: Path) -> None:
    rows: list[tuple[int, int]] = []
    profile = profile_stages(
        "stages:build_stage",
        QUIET,
        4,
        folder=EXAMPLES,
        output=own / "profile.yaml",
        progress=lambda done, total: rows.append((done, total)),
    )
    assert profile is not None
    assert profile == Profile.load(own / "profile.yaml")
    assert sorted(file.name for file in own.glob("profile*")) == ["profile.csv", "profile.yaml"]
    assert rows[-1][0] == rows[-1][1]
    top = {key: options[0].time_s for key, options in profile.measurements.items()}
    assert top[1, "F"] == pytest.approx(top[2, "F"], rel=1e-3)
    assert top[3, "F"] > top[1, "F"]  # the head
    assert all(top[stage, "B"] > top[stage, "F"] for stage in range(4))


def test_ranks_and_one_process_measure_the_same(own: Path) -> None:
    together = ranks("stages", 2, own, QUIET, "2", "1", "together.yaml")
    assert [each.code for each in together] == [0, 0], together
    alone = profile_stages("rank_programs:build_stage", QUIET, 2, settings=OBSERVED)
    assert alone is not None
    for key, rows in Profile.load(own / "together.yaml").measurements.items():
        for one, other in zip(alone.measurements[key], rows, strict=True):
            assert (one.clock_mhz, one.time_s, one.energy_j) == pytest.approx(
                (other.clock_mhz, other.time_s, other.energy_j), rel=1e-9
            )


def test_the_command_profiles_a_job_of_another_folder_with_a_rank_for_each_stage(own: Path) -> None:
    job = [str(own), "profile", str(EXAMPLES / "job.yaml"), "--observe", "-o", "profile.yaml"]
    everyone = ranks("command", 4, own, *job)
    assert [(each.code, each.stderr) for each in everyone] == [(0, "")] * 4
    assert [bool(each.stdout) for each in everyone] == [True, False, False, False]
    assert Profile.load(own / "profile.yaml").stages == 4


def test_too_few_ranks_end_with_one_message(own: Path) -> None:
    everyone = ranks(
        "command", 2, own, str(EXAMPLES), "profile", "job.yaml", "-o", str(own / "profile.yaml")
    )
    assert [each.code for each in everyone] == [2, 2]
    (message,) = {each.stderr for each in everyone} - {""}
    assert message == (
        "Error: 4 stages on 1 GPU each need 4 ranks, but there are 2; start 4 ranks, of one "
        "pipeline only\n"
    )


def test_tensor_parallel_stages_need_ranks(own: Path) -> None:
    with pytest.raises(UsageError) as error:
        profile_stages("own:build_stage", QUIET, 2, tensor_parallel=2)
    assert str(error.value) == (
        "tensor_parallel is 2: the GPUs of a stage are measured together, one rank each; "
        "start with torchrun, 4 ranks in all"
    )


def test_a_rank_that_cannot_find_the_others_is_refused(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UsageError) as error:
        profile_stages("own:build_stage", QUIET, 2)
    assert str(error.value) == (
        "the environment has a rank but no MASTER_ADDR and no MASTER_PORT; start with torchrun, "
        "or unset RANK and WORLD_SIZE to profile in one process"
    )


def test_a_real_gpu_is_not_measured_while_the_cpu_computes() -> None:
    cpu: Any = torch.device("cpu")
    for text in ("nvml:0", "cuda", "dry-run:nvml"):
        with pytest.raises(
            UsageError,
            match="torch computes on cpu here, so that nothing of the stage would run on",
        ):
            gpu_text(text, cpu)
    assert gpu_text("dry-run:nvml:0", cpu) == "dry-run:nvml:0"
    assert gpu_text(QUIET, cpu) == QUIET


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError) as error:
        profile_stages("own:build_stage", QUIET, 2)
    assert (
        str(error.value)
        == "stages are torch modules: run `pip install '.[torch]'` in your clone of perseus-planner"
    )
