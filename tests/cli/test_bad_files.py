"""Damaged, foreign and hostile frontier and plan files are refused in one line, and nothing of
them is run.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from strategies import few_and_many, smooth_profile
from validators import same

from perseus_planner import Frontier, Plan
from perseus_planner.base.errors import FrontierError, PlanError, PlannerError
from perseus_planner.base.files import sha256
from perseus_planner.schedules import one_f_one_b
from perseus_planner.solver.frontier import solve

# NumPy warns of odd headers before it refuses them.
pytestmark = pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    """Two stages, three microbatches, four clocks."""
    return solve(smooth_profile(2, step_mhz=150), one_f_one_b(2, 3))


@pytest.fixture
def plan(frontier: Frontier) -> Plan:
    """A plan between the ends."""
    return frontier.plan_for(1.07 * frontier.baseline_time_s)


def loads(load: Callable[[Path], object], path: Path, data: bytes) -> object | None:
    """What is loaded from `data`, or None when it is refused as it should be: by name, with a
    remedy, in one line.
    """
    path.write_bytes(data)
    error = FrontierError if load == Frontier.load else PlanError
    try:
        return load(path)
    except error as refusal:
        text = str(refusal)
        assert text.startswith(str(path)), text
        assert "\n" not in text, text
        assert ";" in text, text
        return None


@pytest.fixture(params=["frontier", "plan"])
def whole(request: pytest.FixtureRequest, folder: Path) -> Frontier | Plan:
    """A frontier or a plan, and its file, "whole"."""
    made = request.getfixturevalue(request.param)
    made.save("whole")
    return made


def test_a_file_cut_short_anywhere_is_refused(whole: Frontier | Plan):
    data = Path("whole").read_bytes()
    sizes = [*range(len(data) - 1)]
    if isinstance(whole, Frontier):
        sizes = [*sizes[::7], *range(len(data) - 40, len(data))]
    for size in sizes:
        assert loads(type(whole).load, Path("cut"), data[:size]) is None, size


@few_and_many("each", 9, 1)  # of so many bytes one is flipped
def test_a_file_with_any_byte_flipped_is_refused_or_the_same(whole: Frontier | Plan, each: int):
    flips = (0x01, 0x80, 0xFF) if isinstance(whole, Frontier) else (0x01, 0x80, 0x10, 0x02)
    data = Path("whole").read_bytes()
    refused = 0
    places = range(0, len(data), each)
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= flips[place % len(flips)]
        found = loads(type(whole).load, Path("flipped"), bytes(flipped))
        if found is None:
            refused += 1
        else:
            assert same(found, whole) if isinstance(whole, Frontier) else found == whole
    assert refused > 0.8 * len(places)


def rewritten(frontier: Frontier, **changes: object) -> dict[str, np.ndarray]:
    """The arrays of the frontier's file with another header, and with the digest that such a
    file would have.
    """
    frontier.save("whole.npz")
    with np.load("whole.npz") as archive:
        arrays = dict(archive)
    header = {**json.loads(arrays["header"].tobytes()), **changes}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    parts = []
    for name in sorted(set(arrays) - {"digest"}):
        parts += [
            f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode(),
            arrays[name].tobytes(),
        ]
    arrays["digest"] = np.frombuffer(sha256(*parts).encode(), dtype=np.uint8)
    return arrays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": 1},
            "f.npz: is of version 1 and this planner reads version 2; make it again with `planner "
            "solve`",
        ),
        (
            {"version": "1"},
            "f.npz: is of version '1' and this planner reads version 2; make it again with ",
        ),
        (
            {"format": "other"},
            "f.npz: holds 'other', not a frontier; name a file that `planner solve` wrote",
        ),
        (
            {"profile": {"blocking_power_w": -1}},
            "f.npz: is not a frontier: blocking_power_w: -1 is not a power",
        ),
        ({"ranks": ["0F0"]}, "f.npz: is not a frontier: "),
        ({"ranks": [5]}, "f.npz: is not a frontier: "),
        ({"measurements": [1]}, "f.npz: is not a frontier: "),
    ],
)
def test_another_header_is_refused(
    frontier: Frontier, folder: Path, changes: dict[str, object], message: str
):
    np.savez(folder / "f.npz", **rewritten(frontier, **changes))
    with pytest.raises(FrontierError) as caught:
        Frontier.load("f.npz")
    assert str(caught.value).startswith(message)


def test_a_frontier_with_the_digest_of_another_is_refused(frontier: Frontier, folder: Path):
    arrays = rewritten(frontier)
    arrays["times"] = arrays["times"] + 1
    np.savez(folder / "f.npz", **arrays)
    with pytest.raises(FrontierError) as caught:
        Frontier.load("f.npz")
    assert str(caught.value) == (
        "f.npz: its digest does not match its content, so it was changed; make it again with "
        "`planner solve`"
    )


def touching(path: str) -> object:
    """An object that creates `path` when it is unpickled."""

    class Touch:
        def __reduce__(self):
            return open, (path, "w")

    return Touch()


def test_a_pickle_in_a_frontier_is_not_run(frontier: Frontier, folder: Path):
    arrays = rewritten(frontier)
    arrays["waits"] = np.array([touching("ran")], dtype=object)
    np.savez(folder / "f.npz", **arrays)
    assert loads(Frontier.load, Path("f.npz"), (folder / "f.npz").read_bytes()) is None
    assert loads(Frontier.load, Path("f.npz"), pickle.dumps(touching("ran"))) is None
    assert not (folder / "ran").exists()


def npy(shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("times.npy", npy("(1000000000000000,)")),
        ("times.npy", npy("(2,", b"12345678")),
        ("times.npy", b"\x93NUMPY\x09\x00"),
        ("times.npy", b"not an array"),
        ("times.txt", b"not an array"),
    ],
    ids=[
        "of 8 PB",
        "of a broken shape",
        "of another version",
        "of other content",
        "of another name",
    ],
)
def test_an_archive_of_anything_else_is_refused(
    frontier: Frontier, folder: Path, name: str, content: bytes
):
    arrays = rewritten(frontier)
    del arrays["times"]
    np.savez("f.npz", **arrays)
    with zipfile.ZipFile("f.npz", "a") as archive:
        archive.writestr(name, content)
    assert loads(Frontier.load, Path("f.npz"), (folder / "f.npz").read_bytes()) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "version: 1",
            "version: 3",
            "p.yaml, line 2, key 'version': 3 cannot be read: this planner reads versions 1 and ",
        ),
        ("perseus-planner/plan", "perseus-planner/profile", "p.yaml, line 1, key 'format': "),
        ("version: 1\n", "", "p.yaml: has no key 'version'; "),
        (
            "time_s: ",
            "time_s: 9",
            "p.yaml, line 3, key 'digest': does not match the content, so the file was changed ",
        ),
        (
            "gpu: smooth",
            "gpu: !!python/object/apply:os.system ['touch ran']",
            "p.yaml, line 5, column 6: ",
        ),
        ("gpu: smooth", "gpu: !!python/name:os.system", "p.yaml, line 5, column 6: "),
        ("gpu: smooth", "gpu: &a [*a]", "p.yaml"),
        ("gpu: smooth", "gpu: {2001-01-01: 1}", "p.yaml"),
        ("gpu: smooth", "gpu: {[1, 2]: 1}", "p.yaml"),
        (
            "gpu: smooth",
            "gpu: smooth\ngpu: other",
            "p.yaml, line 6: key 'gpu' stands on line 5 too; keep one",
        ),
        (
            "gpu: smooth\n",
            "",
            "p.yaml: has no key 'gpu', as a file that was cut off; copy it again",
        ),
        (
            "gpu: smooth",
            "gpu: smooth\ncpu: other",
            "p.yaml, line 6: unknown key 'cpu'; did you mean 'gpu'?",
        ),
    ],
)
def test_another_plan_is_refused(plan: Plan, folder: Path, old: str, new: str, message: str):
    plan.save("p.yaml")
    text = (folder / "p.yaml").read_text()
    assert re.search(re.escape(old), text)
    (folder / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError) as caught:
        Plan.load("p.yaml")
    assert str(caught.value).startswith(message)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("load", [Frontier.load, Plan.load], ids=["frontier", "plan"])
def test_files_that_are_none_are_refused(load: Callable[[str], object], folder: Path):
    (folder / "empty").write_bytes(b"")
    for name, complaint in (
        (".", "is a folder"),
        ("none", "no such file"),
        ("empty", "is (not a|empty)"),
    ):
        with pytest.raises(PlannerError, match=f"^{re.escape(name)}: {complaint}"):
            load(name)


def test_a_small_plan_cannot_fill_the_memory(plan: Plan, folder: Path):
    levels = [
        "&a0 [x]",
        *(f"&a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 10)),
    ]  # a billion values
    plan.save("p.yaml")
    text = (folder / "p.yaml").read_text()
    (folder / "p.yaml").write_text(text.replace("gpu: smooth", f"gpu: [{', '.join(levels)}]"))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))"
    load = "from perseus_planner import Plan; Plan.load('p.yaml')"
    run = subprocess.run(
        [sys.executable, "-c", f"{limit}; {load}"], capture_output=True, text=True, timeout=300
    )
    assert run.stderr.splitlines()[-1].startswith("perseus_planner.base.errors.PlanError: p.yaml")
