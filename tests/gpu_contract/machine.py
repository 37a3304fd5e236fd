"""A process with a GPU, and what its engines do: plans of a few lines of numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_cuda import Device

RELEASES = ("tensorrt-10.3.0", "tensorrt-10.13.3.9", "tensorrt-11.4.0.106", "tensorrt_rtx-1.7.1.116")
NUMPY = {
    **{"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64, "INT8": np.int8},
    **{"BOOL": np.bool_, "UINT8": np.uint8},
}
Shape = tuple[int, ...]


@dataclass
class Tensor:
    """An input or output; -1 stands for a dynamic dimension.

    Attributes:
        profiles: Smallest, best and largest shape, for each optimization profile; of a shape tensor its values.
    """

    name: str
    shape: Shape
    is_input: bool = True
    dtype: str = "FLOAT"
    format: str = "LINEAR"
    on_host: bool = False
    profiles: tuple[tuple[Shape, Shape, Shape], ...] = ()
    alias: str = ""

    @property
    def itemsize(self) -> int:
        return int(np.dtype(NUMPY[self.dtype]).itemsize)

    @property
    def is_values(self) -> bool:
        return self.is_input and self.on_host


def _from_batch(shapes: Mapping[str, Shape], values: Mapping[str, np.ndarray], out: Tensor) -> Shape:
    first = next(iter(shapes.values()), ())
    return tuple(first[0] if dim == -1 else dim for dim in out.shape)


@dataclass
class Plan:
    """What an engine does.

    Attributes:
        compute: The outputs of the inputs, as memory holds them.
        took_ms: What runs take, one after the other and again from the first.
        layers: What each takes, in milliseconds.
        shape_of: The shape of an output, from the inputs' shapes and the values of shape tensors; -1 where it depends
            on other data.
    """

    tensors: tuple[Tensor, ...]
    compute: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
    shape_of: Callable[[Mapping[str, Shape], Mapping[str, np.ndarray], Tensor], Shape] = _from_batch
    is_version_compatible: bool = False
    streamable: int = 0
    inspected: str | Exception = '{"Layers": ["a", "b"]}'
    took_ms: tuple[float, ...] = (0.25,)
    layers: Mapping[str, float] = field(default_factory=lambda: {"a": 0.125, "b": 0.125})

    @property
    def profiles(self) -> int:
        return max((len(item.profiles) for item in self.tensors), default=0) or 1


@dataclass
class Machine:
    """One process: its device, what lives in it, and how it is to fail.

    Attributes:
        compiled: Of TensorRT for RTX, the kernels that were compiled as engines ran.
    """

    device: Device = field(default_factory=Device)
    release: str = "tensorrt-10.13.3.9"
    plans: dict[bytes, Plan] = field(default_factory=dict)
    loggers: list[Any] = field(default_factory=list)
    loaded_libraries: list[str] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)
    driver_error: str = ""
    uncapturable: bool = False
    kernel_cache: str = "works"
    contexts: list[Any] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)

    @property
    def is_rtx(self) -> bool:
        return self.release.startswith("tensorrt_rtx")

    @property
    def version(self) -> str:
        return self.release.partition("-")[2]

    def engine(self, plan: Plan, name: bytes = b"x") -> bytes:
        """The file of an engine, with the header of the release."""
        numbers = bytes(([int(part) for part in self.version.split(".")] + [0, 0])[:4])
        tail = name.ljust(40, b"\0")
        if self.is_rtx:
            head = b"vtrt" + bytes(4) + b"\x02" + bytes(7)
            data = head + (72).to_bytes(8, "little") + numbers + b"vtrt" + b"\x08" + tail[:39]
        else:
            data = b"ftrt" + bytes(20) + numbers + tail
        self.plans[data] = plan
        return data

    def left(self) -> dict[str, int]:
        """What still lives, on the device and of TensorRT."""
        return self.device.left() | {name: count for name, count in self.alive.items() if count}
