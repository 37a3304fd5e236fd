"""Outputs that another program computed, ``polygraphy run --save-outputs`` for one, as the reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtopt.accuracy.compare import Runner, digest
from trtopt.errors import UsageError
from trtopt.precision.observe.polygraphy import read_outputs
from trtopt.precision.observe.stream import Samples
from trtopt.support.ort_session import Feeds

_REMEDY = "save inputs and outputs in one run: polygraphy run ... --save-inputs inputs.json --save-outputs outputs.json"


@dataclass(frozen=True)
class Recorded:
    """The outputs of a runner by name, by the digest of what it was fed.

    Attributes:
        runner: Its name.
        where: The file, or the folder.
        outputs: Its outputs.
    """

    runner: str
    where: str
    outputs: Mapping[bytes, Mapping[str, np.ndarray]]


def read_recorded(path: Path, feeds: Samples, names: Collection[str]) -> Recorded:
    """Read outputs that belong to ``feeds``, in their order.

    Args:
        path: A file, or a folder with a file for each iteration.
        feeds: What the runner was fed, a sample for each iteration.
        names: The model's outputs, of which there has to be one at least; others are left out.

    Raises:
        UsageError: They cannot be read, are more or fewer than the feeds, or of another model.
    """
    runner, iterations = read_outputs(path)
    digests = [digest(sample) for sample in feeds]
    if len(digests) != len(iterations):
        raise UsageError(
            f"There are outputs of {len(iterations)} iterations, and inputs of {len(digests)}",
            where=f"{path}, {feeds.where}",
            remedy=_REMEDY,
        )
    for index, outputs in enumerate(iterations):
        if not outputs.keys() & set(names):
            raise UsageError(
                f"None of the outputs is one of the model's: {', '.join(list(outputs)[:8]) or 'there are none'}",
                where=f"{path}, iteration {index}",
                remedy=f"save the outputs of this model: {', '.join(names)}",
            )
    kept = ({name: array for name, array in outputs.items() if name in names} for outputs in iterations)
    return Recorded(runner, str(path), dict(zip(digests, kept, strict=True)))


class RecordedRunner:
    """The FP32 model with recorded outputs in the place of its own; what was not recorded, it computes."""

    def __init__(self, runner: Runner, recorded: Recorded) -> None:
        self.output_names = runner.output_names
        self._runner, self._recorded = runner, recorded
        self._is_checked = False

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``. Raises UsageError where a recorded one has another shape."""
        found = self._recorded.outputs.get(digest(feeds), {})
        if self._is_checked and all(name in found for name in self.output_names):
            return [found[name] for name in self.output_names]
        own = dict(zip(self.output_names, self._runner.run(feeds), strict=True))
        for name, array in found.items():
            if name in own and np.shape(own[name]) != array.shape:
                raise UsageError(
                    f"The recorded output {name!r} has the shape {list(array.shape)}, the model's "
                    f"{list(np.shape(own[name]))}",
                    where=self._recorded.where,
                    remedy=_REMEDY,
                )
        self._is_checked = True
        return [found.get(name, own[name]) for name in self.output_names]
