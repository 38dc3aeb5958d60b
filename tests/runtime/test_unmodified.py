"""`planner run` trains scripts by a plan that know nothing of it, with every engine and
launcher.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import EXAMPLES, Ended, by_themselves, ended, free_port, ranks, started
from waiting import eventually, soon

from perseus_planner import Run, runtime
from perseus_planner.engines import blocks
from perseus_planner.gpu.simulated.emulated import open_emulated
from perseus_planner.runs.recording import attempt_path, attempts_in
from perseus_planner.runtime.unmodified.training import UnmodifiedTraining

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(SUPPORT / "tiny_training.py")
GPU = "emulated:a100-sxm?call=0"
PLANNER = ("-m", "perseus_planner", "run")
IMPORTS = {
    "torch": ("torch.distributed.pipelining",),
    "deepspeed": ("deepspeed.pipe",),
    "megatron": ("megatron.core.models.gpt", "megatron.core.pipeline_parallel"),
}  #: engine -> modules of it that are slow to import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan for two ranks, whose ranks also have their state there."""
    _need("torch")
    from runtime_training import plan_of, schedule_of

    for size in (1, 2):
        plan_of(schedule_of("1f1b", size, 4)).save(tmp_path / f"plan-{size}.yaml")
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def _need(engine: str) -> None:
    """Skip if the engine is not installed. It is only looked up: importing it takes seconds and
    warns.
    """
    for name in ("torch", engine):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def torchrun(folder: Path, run: Sequence[str], engine: str) -> list[Ended]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (folder / "fails").touch()
    # Otherwise ranks that torchrun starts again may read addresses of the ranks before them.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    script = ("--max-restarts", "1", SCRIPT, engine, str(folder))
    return [ended(started([*run, sys.executable, *launcher, *script], folder, **store))]


def deepspeed(folder: Path, run: Sequence[str], engine: str) -> list[Ended]:
    launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port")
    script = (str(free_port()), SCRIPT, engine, str(folder))
    return [ended(started([*run, sys.executable, *launcher, *script], folder))]


def processes(folder: Path, run: Sequence[str], engine: str, count: int = 2) -> list[Ended]:
    return by_themselves(count, folder, *run, sys.executable, SCRIPT, engine, str(folder))


def results(folder: Path, count: int = 2) -> list[str]:
    """Return what the ranks have written, and remove it."""
    files = [folder / f"results-{rank}" for rank in range(count)]
    texts = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return texts


def forked(folder: Path, engine: str, count: int = 2) -> list[str]:
    """Return the results of ranks without the planner, forked from a process with the engine
    imported.
    """
    everyone = ranks("script", count, folder, SCRIPT, engine, str(folder), imports=IMPORTS[engine])
    assert [each.code for each in everyone] == [0] * count, [each.stderr for each in everyone]
    return results(folder, count)


def locked_mhz(rank: int) -> int | None:
    with closing(open_emulated(f"a100-sxm/{rank}?call=0")) as gpu:
        return gpu.locked_mhz


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    ("engine", "launch", "plan", "attempts"),
    [
        pytest.param(
            *("torch", processes, ["--plan", "plan-2.yaml"], 1), id="torch, ranks by themselves"
        ),
        pytest.param(
            *("torch", torchrun, ["--plan", "plan-2.yaml"], 2),
            id="torch, torchrun with a restart",
            marks=pytest.mark.soak,  # test_restarts.py has torchrun with a restart
        ),
        pytest.param(
            *("deepspeed", deepspeed, [], 1),
            id="DeepSpeed and its launcher, without a plan",
            marks=[pytest.mark.soak, pytest.mark.newest],
        ),
        pytest.param(
            *("megatron", processes, ["--plan", "plan-2.yaml"], 1),
            id="Megatron's loop, ranks by themselves",
            marks=[pytest.mark.soak, pytest.mark.newest],
        ),
    ],
)
def test_a_script_that_knows_no_planner_trains_with_it(
    folder: Path,
    engine: str,
    launch: Callable[[Path, Sequence[str], str], list[Ended]],
    plan: Sequence[str],
    attempts: int,
):
    _need(engine)
    everyone = launch(folder, [*PLANNER, *plan, "--gpu", GPU, "--record", "run", "--"], engine)
    assert {rank.code for rank in everyone} == {0}, [rank.stderr for rank in everyone]
    assert not [rank.stderr for rank in everyone if "goes on without" in rank.stderr]
    recorded = attempts_in(folder / "run")  # each begins when the runtime attaches
    assert len(recorded) == attempts
    if plan:
        last = Run.load(attempt_path(folder / "run", recorded[-1]))
        assert [[row.is_as_planned for row in rank.iterations] for rank in last.ranks] == [
            [True] * 4
        ] * 2
    assert [locked_mhz(rank) for rank in range(2)] == [None, None]
    assert results(folder) == forked(folder, engine)


def documented() -> dict[str, list[str]]:
    """Return the commands of the page that train with examples, by the name of the example."""
    page = (EXAMPLES.parent / "docs" / "autopilot.md").read_text()
    lines = re.findall(r"^planner run .*(?<=examples/)(\w+)\.py$", page, re.MULTILINE)
    commands = re.findall(r"^planner run .*examples/\w+\.py$", page, re.MULTILINE)
    return {name: shlex.split(line) for name, line in zip(lines, commands, strict=True)}


PLAIN = {
    "plain_torch": "torch",
    "plain_deepspeed": "deepspeed",
    "plain_megatron": "megatron",
    "plain_loop": "torch",
}  #: example -> its engine


def typed(name: str, folder: Path, *more: str) -> Ended:
    """Run the command of the page on emulated GPUs; its launchers are those of this Python."""
    _, run, *options = documented()[name]
    place = options.index("--")
    launcher = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--master_port", str(free_port())],
    }[options[place + 1]]
    script = [*options[place + 2 : -1], str(EXAMPLES / f"{name}.py")]
    planned = ["-m", "perseus_planner", run, *options[:place], "--gpu", GPU, *more, "--"]
    return ended(started([*planned, sys.executable, *launcher, *script], folder))


def losses(text: str) -> list[str]:
    return re.findall(r"step \d+: loss \d+\.\d+", text)


def test_the_page_has_an_example_of_each_kind_that_has_never_heard_of_the_planner():
    assert {*documented()} == {*PLAIN}
    for name in PLAIN:
        assert "perseus" not in (EXAMPLES / f"{name}.py").read_text().lower(), name
    for helper in ("gpt", "megatron_cpu"):
        assert "perseus" not in (EXAMPLES / f"{helper}.py").read_text().lower(), helper


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    "name",
    [
        "plain_torch",
        "plain_loop",
        pytest.param("plain_deepspeed", marks=pytest.mark.soak),
        pytest.param("plain_megatron", marks=pytest.mark.soak),
    ],
)
def test_a_command_of_the_page_follows_its_example_and_changes_no_loss(name: str, folder: Path):
    engine = PLAIN[name]
    _need(engine)
    (folder / "plan-2.yaml").rename(folder / "plan.yaml")
    again = () if "--record" in documented()[name] else ("--record", "run")
    run = typed(name, folder, *again)
    assert run.code == 0, run.stderr
    assert "goes on without" not in run.stderr
    script = (str(EXAMPLES / f"{name}.py"), *(["--local_rank=0"] * (engine == "deepspeed")))
    plain = ranks("script", 2, folder, *script, imports=IMPORTS[engine])
    assert [each.code for each in plain] == [0, 0], [each.stderr for each in plain]
    assert losses(run.stdout) == losses("".join(each.stdout for each in plain))
    assert len(losses(run.stdout)) == 6
    recorded = Run.load(folder / "run")
    assert [len(rank.iterations) >= 5 for rank in recorded.ranks] == [True] * 2


@pytest.mark.soak
@pytest.mark.parametrize("plans_itself", [True, False])
def test_an_example_that_can_plan_itself_is_left_alone_only_when_it_does(
    plans_itself: bool, folder: Path
):
    run = [*PLANNER, "--gpu", GPU, "--record", "outer", "--", sys.executable]
    script = [str(EXAMPLES / "train_torch.py"), "--gpu", "emulated:a100-sxm"]
    script += [] if plans_itself else ["--no-plan"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = ended(started([*run, *launcher, *script], folder))
    assert result.code == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "planner run" in line]
    assert said == ([f"planner: {LEFT_ALONE}"] if plans_itself else [])
    assert (folder / "outer").exists() != plans_itself
    if plans_itself:
        own = Run.load(folder / "trained" / "run")
        assert all(row.is_as_planned for rank in own.ranks for row in rank.iterations)


@pytest.mark.skipif(
    "PLANNER_MEGATRON_LM" not in os.environ,
    reason="PLANNER_MEGATRON_LM names no folder of Megatron-LM",
)
def test_megatron_lm_itself_trains_by_a_plan_and_evaluates_between_iterations(folder: Path):
    script = [
        str(SUPPORT / "megatron_lm.py"),
        os.environ["PLANNER_MEGATRON_LM"],
        str(folder / "results"),
    ]
    run = [*PLANNER, "--plan", "plan-2.yaml", "--gpu", GPU, "--record", "run", "--", sys.executable]
    losses = []
    for command in (script, [*run, *script]):
        everyone = by_themselves(2, folder, *command)
        assert [each.code for each in everyone] == [0, 0], [each.stderr for each in everyone]
        losses.append(results(folder))
    assert losses[0] == losses[1]
    assert len(json.loads(losses[0][1])) > 6 * 4  # of evaluations too
    last = Run.load(folder / "run")
    assert [[row.is_as_planned for row in rank.iterations] for rank in last.ranks] == [
        [True] * 6
    ] * 2


@pytest.mark.needs("autopilot")
def test_a_plan_that_does_not_fit_is_said_once_and_training_goes_on(folder: Path):
    run = [*PLANNER, "--plan", "plan-2.yaml", "--gpu", GPU, "--"]
    (rank,) = processes(folder, run, "torch", 1)
    assert rank.code == 0, rank.stderr
    assert [line for line in rank.stderr.splitlines() if "planner" in line] == [
        "planner: the plan is for pipelines of 2 ranks, and torch.distributed.pipelining runs "
        "pipelines of 1; solve for the schedule that you train with; training goes on without the "
        "planner"
    ]
    assert results(folder, 1) == forked(folder, "torch", 1)


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        pytest.param("torch", ["--plan", "plan-1.yaml"], id="a pipeline"),
        pytest.param("single", [], id="an optimizer without a pipeline"),
    ],
)
def test_a_module_that_is_terminated_leaves_no_clock(
    engine: str, plan: Sequence[str], folder: Path
):
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    job |= {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script = [sys.executable, "-m", "tiny_training", engine, str(folder), "1000000"]
    command = [*PLANNER, *plan, "--gpu", GPU, "--", *script]
    with closing(open_emulated("a100-sxm/0?call=0")) as gpu:
        process = started(command, folder, **job, MASTER_PORT=str(free_port()))
        try:
            eventually(lambda: gpu.locked_mhz is not None or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert ended(process).code == -signal.SIGTERM  # planner has become the script
            soon(lambda: gpu.locked_mhz is None)
        finally:
            process.kill()


WITHOUT_A_PIPELINE = """
import sys, torch

weights = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weights])
for _ in range(3):
    weights.sum().backward()
    optimizer.step()
sys.exit(3)
"""


def test_a_script_without_a_pipeline_ends_with_its_own_code_and_no_traceback(folder: Path):
    (folder / "train.py").write_text(WITHOUT_A_PIPELINE)
    command = [*PLANNER, "--gpu", GPU, "--", sys.executable, "train.py"]
    process = ended(started(command, folder))
    assert (process.code, "Traceback" in process.stderr) == (3, False), process.stderr
    assert locked_mhz(0) is None


# What Python loads when it starts

STARTUP = str(Path(runtime.__file__).absolute().parent / "unmodified" / "startup")


def python(code: str, cwd: Path, modules: Sequence[str]) -> Any:
    """Return what `code` prints as JSON in an interpreter that finds modules in these folders
    first.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(modules)}
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (found.returncode, found.stderr) == (0, "")
    return json.loads(found.stdout)


STATE = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"


def test_a_process_that_trains_nothing_has_one_module_more(tmp_path: Path):
    plain_modules, plain_path = python(STATE, tmp_path, [str(tmp_path)])
    modules, path = python(STATE, tmp_path, [STARTUP, str(tmp_path)])
    assert {*modules} - {*plain_modules} <= {"sitecustomize", "__future__"}
    assert {*plain_modules} <= {*modules}
    assert path == plain_path


def test_an_engine_that_is_imported_but_trains_nothing_loads_no_numpy_and_no_session(
    tmp_path: Path,
):
    engine = tmp_path / "deepspeed" / "runtime" / "pipe"
    engine.mkdir(parents=True)
    for folder in (engine, *engine.parents[:2]):
        (folder / "__init__.py").touch()
    (engine / "engine.py").write_text(
        "class PipelineEngine:\n    def train_batch(self):\n        return __name__\n"
    )
    code = (
        "import deepspeed.runtime.pipe.engine as engine, json, sys\n"
        "names = [each for each in sys.modules if each.startswith('perseus')]\n"
        "train = engine.PipelineEngine.train_batch\n"
        "print(json.dumps([names, type(engine.__loader__).__name__, train.__wrapped__.__name__]))"
    )
    names, loader, wrapped = python(code, tmp_path, [STARTUP, str(tmp_path)])
    assert sorted(name.removeprefix("perseus_planner") for name in names) == [
        *("", ".base", ".base.errors", ".base.loops", ".base.prefixes"),
        *(".engines", ".engines.blocks", ".engines.deepspeed", ".engines.engine"),
        *(".engines.guard", ".engines.releases", ".engines.torch_state"),
        *(".runtime", ".runtime.unmodified", ".runtime.unmodified.training"),
    ]
    assert (loader, wrapped) == ("SourceFileLoader", "train_batch")


@pytest.mark.parametrize("method", ["fork", "spawn", "kernel"])
def test_processes_that_a_script_starts_are_followed_too(method: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import json, multiprocessing, sys\n"
        "def finders(_):\n"
        "    return [type(each).__name__ for each in sys.meta_path if hasattr(each, 'find_spec')]\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(json.dumps(pool.map(finders, [0])[0]))\n"
    )
    code = "import runpy; runpy.run_path('script.py', run_name='__main__')"
    if method == "spawn":  # which loads the script by its path
        code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'script.py']))"
    if method == "kernel":  # of a notebook: a module that is given cells
        (tmp_path / "kernel.py").write_text(
            "import sys\nspace = {'__name__': '__main__'}\n"
            "for cell in sys.stdin.read().split('# %%'):\n    exec(compile(cell, '<cell>', "
            "'exec'), space)\n"
        )
        cells = (
            "import json, sys\n# %%\nprint(json.dumps([type(each).__name__ for each in "
            "sys.meta_path]))\n"
        )
        code = "import subprocess, sys; command = [sys.executable, '-m', 'kernel']; "
        code += f"sys.exit(subprocess.run(command, input={cells!r}, text=True).returncode)"
    assert "_EngineFinder" in python(code, tmp_path, [STARTUP])


def test_a_sitecustomize_that_was_there_is_loaded_too(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("found = __file__\n")
    code = (
        "import json, sitecustomize, sys; print(json.dumps([sitecustomize.found, "
        "len(sys.meta_path)]))"
    )
    found, finders = python(code, tmp_path, [STARTUP, str(tmp_path)])
    assert found == str(tmp_path / "sitecustomize.py")
    assert finders == python(code, tmp_path, [str(tmp_path)])[1] + 1


def test_a_sitecustomize_that_fails_fails_as_it_does_without(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import nothing_like_this\n")
    messages = []
    for modules in ([str(tmp_path)], [STARTUP, str(tmp_path)]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(modules)}
        command = [sys.executable, "-c", "print(len(__import__('sys').meta_path))"]
        found = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300
        )
        messages.append((found.returncode, found.stderr, int(found.stdout)))
    (code, stderr, finders), started_up = messages
    assert "nothing_like_this" in stderr
    assert started_up == (code, stderr, finders + 1)


# What happens at the first training call, with a runtime that only counts


class CountedRuntime:
    """A stand-in for `planner_runtime`."""

    def __init__(self) -> None:
        self.entered: list[tuple[Any, dict[str, Any]]] = []
        self.left = self.iterations = 0
        self.refusal: Exception | None = None

    @contextmanager
    def __call__(self, engine: Any, **options: Any) -> Iterator[CountedRuntime]:
        if self.refusal is not None:
            raise self.refusal
        self.entered.append((engine, options))
        yield self
        self.left += 1

    def end_iteration(self) -> None:
        self.iterations += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedRuntime:
    made = CountedRuntime()
    monkeypatch.setattr(runtime, "planner_runtime", made, raising=False)
    monkeypatch.setattr(blocks, "_giving_way", [])  # without the trainings of other tests
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setenv("PLANNER_PLAN", "plan.yaml")
    monkeypatch.setenv("PLANNER_DRY_RUN", "1")
    return made


def test_only_the_first_call_attaches_with_the_options_of_the_environment(counted: CountedRuntime):
    training, engine = UnmodifiedTraining(), SimpleNamespace()
    assert [training.begin(engine), training.begin(engine)] == [True, False]
    assert counted.entered == [(engine, {"strict": False, "plan": "plan.yaml", "dry_run": True})]


LEFT_ALONE = (
    "this script plans its training itself, with planner_runtime, so `planner run` leaves it alone "
    "and the options of `planner run` are not used"
)


def test_a_script_that_plans_itself_is_left_alone_and_told_so_once(
    counted: CountedRuntime, caplog: pytest.LogCaptureFixture
):
    training, engine = UnmodifiedTraining(), SimpleNamespace()
    with blocks.opened("runtime"):
        assert [training.begin(engine), training.begin(engine)] == [False, False]
    assert not training.begin(engine)  # nor after its block
    assert (counted.entered, caplog.messages) == ([], [f"planner: {LEFT_ALONE}"])


def test_a_script_that_only_imports_the_runtime_is_attached(
    counted: CountedRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "perseus_planner.runtime.session", runtime)
    engine = SimpleNamespace()
    with blocks.opened("runtime"):
        pass  # a block that has ended
    assert UnmodifiedTraining().begin(engine)
    assert ([each for each, _ in counted.entered], caplog.messages) == ([engine], [])


def test_a_profile_is_not_disturbed_and_the_call_after_it_decides(
    counted: CountedRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("PLANNER_PLAN")
    attached, planned, engine = UnmodifiedTraining(), UnmodifiedTraining(), SimpleNamespace()
    with blocks.opened("profile"):
        assert [each.begin(engine) for each in (attached, planned)] == [False, False]
    attached.stepped(Optimizer())  # of the pipeline, so it is not training of its own
    assert counted.entered == []
    with blocks.opened("runtime"):
        assert not planned.begin(engine)
    assert caplog.messages == [f"planner: {LEFT_ALONE}"]
    assert attached.begin(engine)
    assert [each for each, _ in counted.entered] == [engine]


def test_the_runtime_gives_way_to_a_block_that_the_script_opens_later(
    counted: CountedRuntime, caplog: pytest.LogCaptureFixture
):
    training, engine = UnmodifiedTraining(), SimpleNamespace()
    assert training.begin(engine)
    with blocks.opened("profile"):
        assert counted.left == 0
    with blocks.opened("runtime"):
        assert counted.left == 1  # before the script's own runtime begins
        assert not training.begin(engine)
    assert not training.begin(engine)
    with blocks.opened("runtime"):
        training._end()
    assert (len(counted.entered), counted.left) == (1, 1)
    assert caplog.messages == [f"planner: from here on {LEFT_ALONE}"]


def test_a_second_engine_ends_the_runtime(
    counted: CountedRuntime, caplog: pytest.LogCaptureFixture
):
    training, engine = UnmodifiedTraining(), SimpleNamespace()
    training.begin(engine)
    assert [training.begin(each) for each in (SimpleNamespace(), engine, SimpleNamespace())] == [
        False
    ] * 3
    assert (len(counted.entered), counted.left) == (1, 1)
    assert caplog.messages == [
        "planner: a second SimpleNamespace trains in this process, and only one can be planned; "
        "training goes on without the planner"
    ]


def test_a_list_of_chunks_is_the_same_engine_in_another_list(counted: CountedRuntime):
    training, chunks = UnmodifiedTraining(), [SimpleNamespace(), SimpleNamespace()]
    training.begin(chunks)
    training.begin(list(chunks))
    assert counted.left == 0
    training.begin(chunks[:1])
    assert counted.left == 1


@pytest.mark.parametrize(("rank", "count"), [("0", 1), ("1", 0)])
def test_a_refusal_is_said_by_rank_0_and_not_tried_again(
    rank: str,
    count: int,
    counted: CountedRuntime,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("RANK", rank)
    counted.refusal = RuntimeError("no")
    training, engine = UnmodifiedTraining(), SimpleNamespace()
    assert [training.begin(engine), training.begin(engine), training.begin(SimpleNamespace())] == [
        False
    ] * 3
    assert caplog.messages == ["planner: no; training goes on without the planner"] * count


def test_a_forked_process_attaches_nothing_and_leaves_nothing(
    counted: CountedRuntime, monkeypatch: pytest.MonkeyPatch
):
    training = UnmodifiedTraining()
    training.begin(SimpleNamespace())
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert not training.begin(SimpleNamespace())
    training._end()
    assert (len(counted.entered), counted.left) == (1, 0)


def test_the_runtime_is_left_with_the_exception_that_ends_the_process(
    counted: CountedRuntime, monkeypatch: pytest.MonkeyPatch
):
    seen: list[BaseException] = []

    @contextmanager
    def watched(engine: Any, **_: Any) -> Iterator[int]:
        try:
            yield 1
        except ArithmeticError as error:
            seen.append(error)
            raise

    monkeypatch.setattr(runtime, "planner_runtime", watched, raising=False)
    training, error = UnmodifiedTraining(), ArithmeticError("this rank fails")
    training.begin(SimpleNamespace())
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    training._end()
    assert seen == [error]


class Optimizer:
    """Has parameters on a device."""

    def __init__(self, device: str = "cuda") -> None:
        self.param_groups = [{"params": [SimpleNamespace(device=SimpleNamespace(type=device))]}]


@pytest.fixture
def stepping(counted: CountedRuntime, monkeypatch: pytest.MonkeyPatch) -> CountedRuntime:
    monkeypatch.delenv("PLANNER_PLAN")
    return counted


def test_without_a_pipeline_the_steps_of_the_first_optimizer_are_iterations(
    stepping: CountedRuntime,
):
    training, first, second = UnmodifiedTraining(), Optimizer(), Optimizer()
    for optimizer in (first, second, first, second, first):
        training.stepped(optimizer)
    assert [engine for engine, _ in stepping.entered] == [None]
    assert stepping.iterations == 3
    del first, optimizer
    training.stepped(second)  # takes the place of one that is gone
    assert stepping.iterations == 4


def test_an_optimizer_that_trains_instead_of_the_first_ends_the_runtime(
    stepping: CountedRuntime, caplog: pytest.LogCaptureFixture
):
    training, first, second = UnmodifiedTraining(), Optimizer(), Optimizer()
    training.stepped(first)
    for _ in range(300):
        training.stepped(second)
    assert (stepping.iterations, stepping.left, len(stepping.entered), len(caplog.messages)) == (
        1,
        1,
        1,
        1,
    )


def test_the_optimizer_of_a_pipeline_is_not_followed(stepping: CountedRuntime):
    training, engine, optimizer = UnmodifiedTraining(), SimpleNamespace(), Optimizer()
    training.begin(engine)
    training.stepped(optimizer)
    assert ([each for each, _ in stepping.entered], stepping.iterations) == ([engine], 0)


def test_a_pipeline_that_trains_later_takes_the_place_of_the_optimizer(stepping: CountedRuntime):
    training, engine, optimizer = UnmodifiedTraining(), SimpleNamespace(), Optimizer()
    training.stepped(optimizer)
    assert training.begin(engine)
    assert not training.begin(engine)
    training.stepped(optimizer)
    assert ([each for each, _ in stepping.entered], stepping.left, stepping.iterations) == (
        [None, engine],
        1,
        1,
    )


def test_an_optimizer_on_the_cpu_or_with_a_plan_for_pipelines_is_not_followed(
    stepping: CountedRuntime, monkeypatch: pytest.MonkeyPatch
):
    training, optimizer = UnmodifiedTraining(), Optimizer("cpu")
    training.stepped(optimizer)
    monkeypatch.setenv("PLANNER_PLAN", "plan.yaml")
    training.stepped(Optimizer())
    assert stepping.entered == []
    monkeypatch.delenv("PLANNER_PLAN")
    monkeypatch.setenv("PLANNER_GPU", "emulated:a100-sxm")
    training.stepped(optimizer)
    assert stepping.iterations == 1
