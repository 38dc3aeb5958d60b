"""One row of a profile: a computation repeated in windows at the present setting, and what the windows say of it.

The good practice that this follows: warm up, measure windows of seconds, begin each at another phase of the power
sensor, repeat, watch the temperature (Yang et al., "Accurate and Convenient Energy Measurements for GPUs", SC'24).
The device is synchronised only at the edges of a window.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuNotSupported
from perseus_planner.profiler.counter import Edge, EnergyCounter
from perseus_planner.profiler.estimates import LEAST_WINDOWS, Window, agree, row_of, together, without_outliers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from random import Random

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.stage import Group, Run
    from perseus_planner.profiles.measurement import Measurement

_LEAST_STEPS = 10  # a window has at least so many steps of the counter
_LEAST_REPETITIONS = 3
_PARTS = 4  # a window's repetitions are launched in so many parts, and the GPU is looked at in the middle of each
_WARM_UP = 0.1  # a chunk of the warm-up lasts this part of a window
_WARM = 0.02  # two chunks that differ by less are stable
_MOST_CHUNKS = 20
_MOST_WINDOWS = 12
_MOST_SPOILED = 5
_THROTTLED = 0.01  # the part of a window above which a reason that held is said
_MOST_HEATING = 12  # windows that warm the GPU through before the first row
_WARMING_C = 1.0  # a window that warms it by no more ends that
_WARMER_C = 5.0  # a GPU is cool when it is no warmer than this above what it was after that
_LOOK_S = 0.5


class Windows:
    """Measures rows on one GPU, in step with the GPUs that share its stage.

    Attributes:
        counter: the energy counter.
        window_s: the length of a window, seconds.

    Args:
        gpu: the GPU; the clocks that rows are measured at are set by the caller.
        synchronize: returns when the GPU has finished all that was launched.
        group: the GPUs that measure in step. Whether a window counts and how many there are is decided for all.
        window_s: the least length of a window, seconds; it is made longer where the counter's step wants it.
        cool_down_s: the longest wait for the GPU to cool down, seconds.

    Raises:
        GpuError: the energy counter cannot be used.
    """

    def __init__(
        self, gpu: Gpu, synchronize: Callable[[], None], group: Group, window_s: float, cool_down_s: float
    ) -> None:
        self._gpu, self._synchronize, self._group, self._cool_down_s = gpu, synchronize, group, cool_down_s
        self._cool_c = gpu.temperature_c()
        self._edge: Edge | None = None  # where the last window ended, while nothing has run since
        self.counter = EnergyCounter(gpu)
        self.window_s = max(group.gathered(max(window_s, _LEAST_STEPS * self.counter.step_s)))

    def warm_through(self, run: Run) -> None:
        """Run until the GPU gets no warmer, for a limited time.

        Training runs on a warm GPU, which draws more and under a power cap is slower than a cool one; and rows are
        compared with each other. What it is like then is what `cool_down` goes back to.

        Raises:
            GpuError: the GPU cannot be read, or `run` takes no time.
        """
        repetitions = math.ceil(self.window_s / max(self._group.gathered(self._warmed_up(run))))
        for _ in range(_MOST_HEATING):
            before_c = self._gpu.temperature_c()
            self._timed(run, repetitions)
            self._cool_c = self._gpu.temperature_c()
            if max(self._group.gathered(self._cool_c - before_c)) <= _WARMING_C:
                break

    def row(self, run: Run, setting: int | None, random: Random) -> Measurement:
        """Measure `run` at the present setting.

        Windows are measured until three or more agree; those far from the median are left out. A window that the GPU
        spent too hot is measured again after a cool-down; where none can be had otherwise, such windows count, and the
        row's evidence names the reason: training would meet it too.

        Args:
            run: what is repeated.
            setting: what was set, MHz or watts; None where nothing was, and the row gets the clock that was achieved.
            random: when windows begin. The same for all of a group.

        Raises:
            GpuError: the GPU cannot be read, or `run` takes no time.
        """
        time_s = self._warmed_up(run)
        repetitions = max(_LEAST_REPETITIONS, math.ceil(self.window_s / max(self._group.gathered(time_s))))
        clean: list[Window] = []
        spoiled: list[Window] = []
        while len(clean) < _MOST_WINDOWS and len(spoiled) <= _MOST_SPOILED:
            window = self._window(run, repetitions, time_s, random.random())
            (clean if window.clean else spoiled).append(window)
            if window.held_back:
                self.cool_down()
            if agree(without_outliers(clean)):
                break
        windows = without_outliers(clean if len(clean) >= LEAST_WINDOWS else clean + spoiled)
        return row_of(windows, setting)

    def cool_down(self) -> None:
        """Wait until the GPU is about as cool as once it was warm, for a limited time."""
        give_up_s = self._gpu.now_s() + self._cool_down_s
        self._edge = None  # a GPU that cools draws ever less
        while self._gpu.now_s() < give_up_s and self._gpu.temperature_c() > self._cool_c + _WARMER_C:
            self._gpu.wait(min(_LOOK_S, self._cool_down_s))

    def power_w(self, action: Callable[[], None]) -> float:
        """Mean watts, in all of the group, while `action` keeps the GPU busy; it lasts some steps of the counter."""
        time_s, energy_j = self._spent(action, 0.0)
        return math.fsum(self._group.gathered(energy_j / time_s))

    def _warmed_up(self, run: Run) -> float:
        """Seconds of a repetition on this GPU, once they are stable on all of the group."""
        before_s, repetitions = math.inf, 1
        for _ in range(_MOST_CHUNKS):
            own_s = self._timed(run, repetitions)
            chunk_s = max(self._group.gathered(own_s))
            if chunk_s <= 0:
                raise GpuError(f"{self._gpu.name}: what is to be measured takes no time; give a stage that runs on it")
            time_s, long_s = chunk_s / repetitions, _WARM_UP * self.window_s
            if chunk_s < long_s:
                repetitions = math.ceil(min(10.0, 1.1 * long_s / chunk_s) * repetitions)
            elif abs(time_s - before_s) <= _WARM * time_s:
                break
            before_s = time_s
        return own_s / repetitions

    def _timed(self, run: Run, repetitions: int) -> float:
        self._edge = None
        self._synchronize()
        begin_s = self._gpu.now_s()
        run(repetitions)
        self._synchronize()
        return self._gpu.now_s() - begin_s

    def _window(self, run: Run, repetitions: int, time_s: float, phase: float) -> Window:
        """One window of the group."""
        looks: list[tuple[int, float, frozenset[str]]] = []
        throttled_s = self._throttled_s()

        def work() -> None:
            begin_s, launched = self._gpu.now_s(), 0
            for part in _parts(repetitions):
                run(part)
                # The GPU may be far behind: it is looked at in the middle of this part, with half of it still to do.
                middle_s = begin_s + (launched + part / 2) * time_s
                launched += part
                if self._gpu.now_s() < middle_s:
                    self._gpu.wait(middle_s - self._gpu.now_s())
                looks.append((self._gpu.clock_mhz(), self._gpu.temperature_c(), self._reasons()))

        spent_s, energy_j = self._spent(work, phase)
        counted = {
            reason
            for reason, held_s in self._throttled_s().items()
            if held_s - throttled_s.get(reason, 0.0) > _THROTTLED * spent_s
        }
        clocks, temperatures, reasons = zip(*looks, strict=True)
        own = Window(
            spent_s / repetitions,
            energy_j / repetitions,
            fmean(clocks),
            max(temperatures),
            max(temperatures) - min(temperatures),
            frozenset(counted.union(*reasons)),
        )
        return together(self._group.gathered(own))

    def _spent(self, action: Callable[[], None], phase: float) -> tuple[float, float]:
        """Seconds and joules of `action`, begun at a part `phase` of a step after one."""
        self._synchronize()
        start = self._edge or self.counter.at_rest()
        self._gpu.wait(phase * self.counter.step_s)
        self._group.gathered(None)  # all begin together
        begin_s = self._gpu.now_s()
        action()
        self._synchronize()
        end_s = self._gpu.now_s()
        self._edge = end = self.counter.at_rest()
        at_rest_j = start.rest_w * (begin_s - start.time_s) + end.rest_w * (end.time_s - end_s)
        return end_s - begin_s, max(0.0, end.energy_j - start.energy_j - at_rest_j)

    def _reasons(self) -> frozenset[str]:
        try:
            return self._gpu.throttle_reasons()
        except GpuNotSupported:
            return frozenset()

    def _throttled_s(self) -> Mapping[str, float]:
        try:
            return self._gpu.throttled_s()
        except GpuNotSupported:
            return {}


def _parts(repetitions: int) -> Iterator[int]:
    parts = min(_PARTS, repetitions)
    yield from ((number + 1) * repetitions // parts - number * repetitions // parts for number in range(parts))
