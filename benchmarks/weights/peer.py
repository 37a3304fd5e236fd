"""INT4 weights in blocks of 128 by Model Optimizer: ``python peer.py METHOD MODEL.onnx CALIB_FOLDER OUT.onnx``.

METHOD is ``awq_lite`` or ``rtn_dq``. CALIB_FOLDER holds an .npz for each feed. AWQ joins what a layer reads over the
feeds, so that sequences are filled up to one length with masked zeros. The written model is given opset 21: Model
Optimizer 0.47 leaves it at that of the source, which has no blocks, and ONNX Runtime refuses it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from modelopt.onnx.quantization.int4 import quantize


class Feeds:
    """Feeds of one length, as often as they are asked for."""

    def __init__(self, folder: Path) -> None:
        feeds = [dict(np.load(file)) for file in sorted(folder.glob("*.npz"))]
        longest = max(array.shape[1] for feed in feeds for array in feed.values())
        self._feeds = [
            {name: np.pad(array, ((0, 0), (0, longest - array.shape[1]))) for name, array in feed.items()}
            for feed in feeds
        ]
        self.rewind()

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(self._feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next feed; None at the end."""
        return next(self._left, None)

    def rewind(self) -> None:
        """Begin again."""
        self._left = iter(self._feeds)


def main(method: str, source: str, folder: str, out: str) -> None:
    """Quantize, and write the model with an opset that has blocks."""
    made = quantize(
        source,
        calibration_method=method,
        calibration_data_reader=Feeds(Path(folder)),
        block_size=128,
        use_external_data_format=False,
        calibration_eps=["cpu"],
    )
    for item in made.opset_import:
        item.version = max(item.version, 21) if item.domain == "" else item.version
    onnx.save(made, out)


if __name__ == "__main__":
    main(*sys.argv[1:5])
