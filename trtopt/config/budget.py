"""How much accuracy may be lost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtopt.errors import UsageError

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

    def with_given(self, agreement: float | None, sqnr_db: float | None) -> Floor | None:
        """With what the user says, which 0 turns off; an SQNR bounds all outputs, and takes the place of the floor's.
        None where nothing is asked."""
        floor = Floor(
            self.agreement if agreement is None else agreement or None, self.sqnr_db if sqnr_db is None else None
        )
        return None if floor == Floor() else floor

    def excess(self, disagreement: float, noise: float) -> float:
        """How many times too large the largest disagreement or noise over signal is; 1 where both hold."""
        found = 1.0
        if self.agreement is not None and 1 - disagreement < self.agreement - ROUNDING:
            found = disagreement / max(1 - self.agreement, ROUNDING)
        if self.sqnr_db is not None and noise > (most := 10 ** (-self.sqnr_db / 10)):
            found = max(found, noise / most)
        return found


TOLERANCE = 1e-5
"""Absolute or relative, of what has none beside one that was given: the default of ``polygraphy run``."""


@dataclass(frozen=True)
class Tolerances:
    """How far values of outputs may be off, as ``polygraphy run --atol --rtol`` has it: a value is wrong where it is
    beyond both the absolute and the relative tolerance, the latter being a share of the reference.

    Attributes:
        atol: Absolute, by output name; that of the others under the empty name, else :data:`TOLERANCE`.
        rtol: Relative, likewise.

    Example:
        >>> Tolerances.parsed(("1e-3", "boxes:0.5"), ()).of("boxes")
        (0.5, 1e-05)
    """

    atol: Mapping[str, float]
    rtol: Mapping[str, float]

    @classmethod
    def parsed(cls, atol: Sequence[str], rtol: Sequence[str]) -> Tolerances:
        """What the options say, each ``[OUTPUT:]X``. Raises UsageError: one is not a number from 0 on."""
        return cls(_by_output(atol, "--atol"), _by_output(rtol, "--rtol"))

    def of(self, output: str) -> tuple[float, float]:
        """The absolute and the relative tolerance of an output."""
        atol, rtol = (found.get(output, found.get("", TOLERANCE)) for found in (self.atol, self.rtol))
        return atol, rtol

    def check(self, outputs: Collection[str]) -> None:
        """Raise UsageError where a tolerance is of an output that is not among ``outputs``."""
        for option, found in (("--atol", self.atol), ("--rtol", self.rtol)):
            for name in found.keys() - {"", *outputs}:
                what = f"The model has no output {name!r}"
                raise UsageError(what, where=option, remedy=f"its outputs: {', '.join(outputs)}")


def _by_output(items: Sequence[str], option: str) -> dict[str, float]:
    found = {}
    for item in items:
        name, _, text = item.rpartition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise UsageError(
                f"Not a tolerance: {item!r}", where=option, remedy="give a number from 0 on, or OUTPUT:NUMBER"
            )
        found[name] = value
    return found


DEFAULT_FLOOR = Floor(0.98, 20.0)
"""The floor of INT8 and FP8 on a caller's samples."""


RANDOM_DB = 22.0
"""What outputs keep on random data where a search needs a bound: the floor of real data, and 2 dB for other samples."""

RANDOM_FLOOR = Floor(None, RANDOM_DB)
"""That of INT8 and FP8 where nobody gave samples: which element of an output is the largest says nothing then."""


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
    def is_advice(self) -> bool:
        """Whether missing it fails no build: regions went back, and random data says no more."""
        return self.floor == RANDOM_FLOOR

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

    def on_random_data(self) -> AccuracyBudget:
        """What a default is where nobody gave samples: which element of an output is the largest says nothing then."""
        db = RANDOM_DB if self.sqnr_db is None else self.sqnr_db
        return replace(self, drop=None, sqnr_db=db) if self.is_default else self

    def as_asked(self) -> AccuracyBudget:
        """Without a drop that nobody gave."""
        return AccuracyBudget(sqnr_db=self.sqnr_db, floor=self.floor) if self.is_default else self
