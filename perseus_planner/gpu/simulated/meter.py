"""Virtual time and energy, and how an energy counter and a power sensor show them."""

from __future__ import annotations

from collections import deque


class Meter:
    """Adds up what is drawn.

    Args:
        step_s: how often the counter moves, seconds; 0: always.
        phase_s: when it moves first.
        average_s: what the sensor averages over; 0: nothing, it tells the power of the moment.
        stuck_at_s: from when on the counter stands still.
        before_w: what was drawn before.
    """

    def __init__(self, step_s: float, phase_s: float, average_s: float, stuck_at_s: float, before_w: float) -> None:
        self.now_s = 0.0
        self.counter_j = 0.0  #: what the counter shows
        self._step_s, self._phase_s, self._average_s, self._stuck_at_s = step_s, phase_s, average_s, stuck_at_s
        self._energy_j = 0.0
        self._power_w = before_w
        self._past = deque([(-average_s, -average_s * before_w), (0.0, 0.0)])  # (moment, joules until then)

    def spend(self, duration_s: float, power_w: float) -> None:
        """Let `duration_s` pass at one power."""
        start_s, start_j = self.now_s, self._energy_j
        self.now_s, self._energy_j = start_s + duration_s, start_j + power_w * duration_s
        self._power_w = power_w
        shown_s = min(self._last_move_s(), self._stuck_at_s)
        if shown_s > start_s:
            self.counter_j = start_j + power_w * (shown_s - start_s)
        self._past.append((self.now_s, self._energy_j))
        while len(self._past) > 2 and self._past[1][0] <= self.now_s - self._average_s:
            self._past.popleft()

    def saved(self) -> dict[str, float]:
        """What `restore` takes: time, energy, what the counter shows and the power of the moment."""
        return {
            "now_s": self.now_s,
            "energy_j": self._energy_j,
            "counter_j": self.counter_j,
            "power_w": self._power_w,
        }

    def restore(self, saved: dict[str, float]) -> None:
        """Go on from there; a sensor that averages takes the power of that moment for that of the time before."""
        self.now_s, self._energy_j = saved["now_s"], saved["energy_j"]
        self.counter_j, self._power_w = saved["counter_j"], saved["power_w"]
        before_j = self._energy_j - self._average_s * self._power_w
        self._past = deque([(self.now_s - self._average_s, before_j), (self.now_s, self._energy_j)])

    def sensed_w(self) -> float:
        """What the sensor shows, watts."""
        if not self._average_s:
            return self._power_w
        (early_s, early_j), (late_s, late_j) = self._past[0], self._past[1]
        share = (self.now_s - self._average_s - early_s) / (late_s - early_s)
        return (self._energy_j - (early_j + share * (late_j - early_j))) / self._average_s

    def _last_move_s(self) -> float:
        if not self._step_s:
            return self.now_s
        return self.now_s - (self.now_s - self._phase_s) % self._step_s
