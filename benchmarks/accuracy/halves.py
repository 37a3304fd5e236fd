"""A model's own metric on every second sample of its evaluation data: one half to search with, the other to score.

``evaluate.py`` of the models' folder computes the metrics; what it reads is cut in half here. The even half also holds
the samples that some models' calibration feeds come from.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from subjects import Run

SEARCH, SCORE = 0, 1
"""Even samples, odd samples."""

_CALIBRATION = 200
"""Leading samples of the tables of digits and of clips; they are in no metric."""


class Half:
    """One half of a model's evaluation data.

    Args:
        models: The folder with ``evaluate.py``.
        name: What it calls the model.
        key: The metric among those it returns.
        parity: ``SEARCH`` or ``SCORE``.
    """

    def __init__(self, models: Path, name: str, key: str, parity: int) -> None:
        self._name, self._key, self._parity = name, key, parity
        self._evaluate = _fresh(models / "evaluate.py")
        self._folder = tempfile.TemporaryDirectory()
        self._cut(self._evaluate)

    def metric(self, run: Run) -> float:
        """The metric of ``run`` on this half, as a fraction."""
        if self._name == "crepe_tiny":
            return self._argmax_agreement(run)
        return float(self._evaluate.metric(self._name, run)[self._key])

    def _cut(self, evaluate: Any) -> None:
        """Replace what the metrics read by half of it."""
        read_set, coco = evaluate._set, evaluate._coco
        mnist, kws = evaluate._mnist, evaluate._kws

        def half_set(side: str, split: str) -> Iterator[Any]:
            return itertools.islice(read_set(side, split), self._parity, None, 2)

        evaluate._set = half_set
        evaluate._coco = lambda: coco()[self._parity :: 2]
        evaluate._mnist = lambda: self._behind_calibration(*mnist())
        evaluate._kws = lambda: self._behind_calibration(*kws())
        if self._name in evaluate.STS:
            rows = list(csv.reader(open(evaluate.STS[self._name], encoding="utf-8", newline="")))  # noqa: SIM115
            path = Path(self._folder.name) / "half.csv"
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(rows[self._parity :: 2])
            evaluate.STS = {self._name: str(path)}

    def _behind_calibration(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = [*range(_CALIBRATION), *range(_CALIBRATION + self._parity, len(labels), 2)]
        return inputs[kept], labels[kept]

    def _argmax_agreement(self, run: Run) -> float:
        """``argmax_agree`` of crepe, whose frames are cut while they are read."""
        with np.load(self._evaluate.P(self._name, "reference.npz")) as arrays:
            frames, wanted = arrays["frames"][self._parity :: 2], arrays["activation"][self._parity :: 2]
        found = [np.asarray(run({"frames": frames[i : i + 1]})[0]).argmax(1) for i in range(len(frames))]
        return float((np.concatenate(found) == wanted.argmax(1)).mean())


def _fresh(path: Path) -> ModuleType:
    """``evaluate.py`` as a module of its own, so that cutting its data leaves others' alone."""
    spec = importlib.util.spec_from_file_location("evaluate_half", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_script(path: Path, models: Path, name: str, key: str) -> str:
    """Write the script that ``--metric`` is given, for the half to search with.

    Returns:
        ``FILE.py:FUNCTION``.
    """
    lines = [
        f'"""The metric of {name} on every second sample."""',
        "import sys",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        "from pathlib import Path",
        "from halves import SEARCH, Half",
        f"metric = Half(Path({str(models)!r}), {name!r}, {key!r}, SEARCH).metric",
    ]
    path.write_text("\n".join(lines) + "\n")
    return f"{path}:metric"
