"""The energy of training with Hugging Face's Trainer, in its logs.

trainer.add_callback(EnergyCallback("nvml:0"))
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from perseus_planner.gpu.monitor import Monitor, Window


class EnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds `energy_j` and `average_w` since the log before to each log of a training; the arguments
    are those of `Monitor`.

    Logs outside a training, such as those of `Trainer.evaluate()`, are left as they are.
    """

    def __init__(self, *gpus: Any, **options: Any) -> None:
        self._arguments = (list(gpus) or None, options)
        self._window: Window | None = None  #: since the last log; None outside a training

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to measure."""
        gpus, options = self._arguments
        self._monitor = Monitor(gpus, **options)
        self._window = self._monitor.window("train").begin()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any
    ) -> None:
        """Add what was measured since the log before."""
        if self._window is None:
            return
        # The next window begins at once, so that none of the training is left out between two logs.
        window = self._window.end()
        self._window = self._monitor.window("train").begin()
        measured = {"energy_j": window.energy_j, "average_w": window.average_w}
        logs.update(measured)
        state.log_history[-1].update(measured)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End to measure."""
        self._window = None
        self._monitor.close()
