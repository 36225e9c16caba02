"""State of the random numbers that tasks may draw when their requests are built.

Planning sets lm-eval's seeds. Requests are built later, when other runs may have drawn numbers or set the seeds again,
so a plan keeps the state and its requests are built from it: those of a single run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RandomState:
    """State of Python's and NumPy's global random number generators."""

    python: Any
    numpy: Any

    def restore(self) -> None:
        """Set both generators to this state."""
        import numpy as np

        random.setstate(self.python)
        np.random.set_state(self.numpy)


def random_state() -> RandomState:
    """Return the current state."""
    import numpy as np

    return RandomState(random.getstate(), np.random.get_state())
