"""How much accuracy may be lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

DEFAULT_ACCURACY_DROP = 0.01
"""The largest drop of accuracy where nobody gives one: that of NNCF's accuracy control."""

ROUNDING = 1e-9
"""Of a difference of two shares: 0.9 - 0.895 is a little more than 0.005."""


@dataclass(frozen=True)
class Floor:
    """The least that outputs keep of FP32, whatever a metric says.

    Attributes:
        agreement: The least top-1 agreement of outputs that hold scores, 0..1; None for any.
        sqnr_db: The lowest signal to noise of the other outputs, in dB; None for any.
    """

    agreement: float | None = None
    sqnr_db: float | None = None

    def excess(self, disagreement: float, noise: float) -> float:
        """How many times too large the largest disagreement or noise over signal is; 1 where both hold."""
        found = 1.0
        if self.agreement is not None and 1 - disagreement < self.agreement - ROUNDING:
            found = disagreement / max(1 - self.agreement, ROUNDING)
        if self.sqnr_db is not None and noise > (most := 10 ** (-self.sqnr_db / 10)):
            found = max(found, noise / most)
        return found


DEFAULT_FLOOR = Floor(0.98, 20.0)
"""The floor of INT8 and FP8 on a caller's samples."""


@dataclass(frozen=True)
class AccuracyBudget:
    """How much accuracy may be lost, and who says so.

    Attributes:
        drop: The largest drop of the metric, or of the agreement with FP32; None for any.
        sqnr_db: The lowest signal to noise of an output, in dB; None for any.
        source: Who gave ``drop``: ``default`` where nobody did and a search needs one.
        floor: What outputs keep besides; None where nothing is asked of them.
    """

    drop: float | None = None
    sqnr_db: float | None = None
    source: Literal["user", "default"] = "user"
    floor: Floor | None = None

    @property
    def is_default(self) -> bool:
        """Whether nobody gave the drop."""
        return self.source == "default"

    @property
    def is_given(self) -> bool:
        """Whether anything besides the floor is bounded."""
        return self.drop is not None or self.sqnr_db is not None

    @property
    def largest_drop(self) -> float:
        """The bound on the drop; infinite where there is none."""
        return math.inf if self.drop is None else self.drop

    @property
    def largest_error(self) -> float:
        """The bound on noise power over signal power; infinite where there is none."""
        return math.inf if self.sqnr_db is None else 10 ** (-self.sqnr_db / 10)

    def allows(self, drop: float) -> bool:
        """Whether a drop is within the budget; NaN is not."""
        return self.drop is None or drop <= self.drop + ROUNDING

    def allows_sqnr(self, sqnr_db: float) -> bool:
        """Whether the signal to noise of an output is within the budget; NaN is not."""
        return self.sqnr_db is None or sqnr_db >= self.sqnr_db

    def words(self) -> str:
        """The drop and the option it is of, as messages end."""
        return f"{self.drop:g} of --max-accuracy-drop{', its default here' if self.is_default else ''}"

    def halved(self) -> AccuracyBudget:
        """With half of the drop, where the other half is for something else."""
        return self if self.drop is None else replace(self, drop=self.drop / 2)

    def as_asked(self) -> AccuracyBudget:
        """Without a drop that nobody gave."""
        return AccuracyBudget(sqnr_db=self.sqnr_db, floor=self.floor) if self.is_default else self
