"""Labels of pictures in the terms of a network's input: boxes in its pixels, masks and targets as large as it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trtopt.images.decode import picture_size, prepare, read_mask
from trtopt.images.labels import Labels
from trtopt.images.preprocess import Preprocess, Size


@dataclass(frozen=True)
class PlacedLabels:
    """Labels that are read and computed when they are asked for, so that memory does not grow with their pictures.

    Attributes:
        labels: Of kind ``boxes`` or ``picture``.
        how: What is done to the pictures.
    """

    labels: Labels
    how: Preprocess

    def __len__(self) -> int:
        return len(self.labels.files)

    def __getitem__(self, part: slice) -> PlacedLabels:
        """Those of some of the pictures."""
        chosen = replace(self.labels, files=self.labels.files[part], values=self.labels.values[part])
        return replace(self, labels=chosen)

    def boxes(self, index: int) -> np.ndarray:
        """FP32 ``[boxes, 6]``: class, left, upper, right and lower edge in pixels of the input, and 1 for a crowd.

        Stretching a picture changes no share in which boxes overlap: figures are those in the picture's own pixels.
        """
        shares = np.asarray(self.labels.values[index])
        height, width = self.how.resized(*picture_size(self.labels.files[index]))
        top, left = self.how.corner((height, width))
        found = shares.copy()
        found[:, 1:5] = shares[:, 1:5] * (width, height, width, height) + (left, top, left, top)
        return found

    def mask(self, index: int, size: Size) -> np.ndarray:
        """The class of each pixel, integers of ``size``; 255 around the picture. Raises UsageError: it is no mask."""
        return read_mask(Path(str(self.labels.values[index])), self._scaled(size))

    def target(self, index: int, size: Size) -> np.ndarray:
        """The picture that the network should give, as its input would be: ``[1, 3, *size]``."""
        return prepare(Path(str(self.labels.values[index])), self._scaled(size))

    def _scaled(self, size: Size) -> Preprocess:
        """The same for an output of ``size``, which may be larger or smaller than the input."""
        resize, (height, width) = self.how.resize, self.how.size
        if isinstance(resize, int):
            resize = round(resize * size[0] / height)
        elif resize is not None:
            resize = round(resize[0] * size[0] / height), round(resize[1] * size[1] / width)
        return replace(self.how, size=size, resize=resize, dtype="float32")
