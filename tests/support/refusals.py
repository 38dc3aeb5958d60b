"""What a refused call says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(error: type[Exception], call: Callable[..., object], *given: Any, **named: Any) -> str:
    """The text of the error that a call raises, which is of that type."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
