"""The ``config.pbtxt`` of a model in a repository of Triton Inference Server, from its inputs and outputs.

What Triton and its backends demand was read in their sources (``model_config.proto``; ``src/model_config_utils.cc`` of
the core; ``src/onnxruntime.cc`` and ``src/model_state.cc`` of the backends), and the tests check the files with the
client package's schema. No server was ever run with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtopt.config import ShapeMap
from trtopt.engine.request import BATCH_RANGE
from trtopt.errors import InvalidModelError, UsageError
from trtopt.report.schema.manifest import EngineTensor

_ESCAPES = {0x22: r"\"", 0x5C: r"\\", 0x0A: r"\n", 0x0D: r"\r", 0x09: r"\t"}


class Word(str):
    """A value that is written without quotes: one of an enum."""


def text(message: Mapping[str, Any]) -> str:
    """A message as text.

    Args:
        message: Values by field. A mapping is a message, a sequence a repeated field, a string is quoted unless it is a
            :class:`Word`. Fields that are None are left out.
    """
    return "".join(line + "\n" for line in _lines(message, ""))


def entries(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map field: the text format writes it as repeated messages of key and value."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _lines(message: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in message.items():
        if value is None:
            continue
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if is_list and not any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]"
            continue
        for item in value if is_list else (value,):
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return f'"{"".join(map(_escaped, str(value).encode()))}"'


def _escaped(byte: int) -> str:
    if byte in _ESCAPES:
        return _ESCAPES[byte]
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"


Runtime = Literal["tensorrt", "onnxruntime"]

CONFIG = "config.pbtxt"

_PLAIN_TYPES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64".split()
_ONNX_TYPES = {name: f"TYPE_{name.upper()}" for name in _PLAIN_TYPES} | {
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    "object": "TYPE_STRING",
}
_ENGINE_TYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32")
TYPES: Mapping[Runtime, Mapping[str, str]] = {
    "onnxruntime": _ONNX_TYPES,
    "tensorrt": {**{name: _ONNX_TYPES[name] for name in _ENGINE_TYPES}, "bfloat16": "TYPE_BF16"},
}
"""Triton's names of numpy's types, by backend (Triton's user guide, "Model Configuration", table of datatypes)."""

_PLATFORMS: Mapping[Runtime, str] = {"tensorrt": "tensorrt_plan", "onnxruntime": "onnxruntime_onnx"}
FILES: Mapping[Runtime, str] = {"tensorrt": "model.plan", "onnxruntime": "model.onnx"}
"""What the file of a model is called, by backend."""

_NON_LINEAR_RANK = 3
"""How many dimensions, the batch apart, Triton lets a tensor of another memory layout have."""


@dataclass(frozen=True)
class TritonConfig:
    """How a model is to be served.

    Attributes:
        name: Its name in the repository; None for that of the file.
        version: Its version, a positive number; None for the one after the latest.
        max_batch: The largest batch; 0 for no batching; None for the largest that the engine takes, of an ONNX model
            16, where every input and output begins with the same dynamic axis.
        max_delay_us: How long a request may wait for others to share its batch, in microseconds.
        max_queue: How many requests may wait before Triton rejects others; 0 for any number.
        instances: How many instances of the model run side by side on each device.
        device: ``gpu``, or ``cpu`` for an ONNX model on ONNX Runtime's own kernels.
        engine_cache: Of an ONNX model on a GPU: a folder on the server that keeps the engines TensorRT builds from it.
        min_shapes: Of an ONNX model: the smallest shapes, by input.
        opt_shapes: The shapes to be fastest at.
        max_shapes: The largest shapes.
    """

    name: str | None = None
    version: int | None = None
    max_batch: int | None = None
    max_delay_us: int = 0
    max_queue: int = 0
    instances: int = 1
    device: Literal["gpu", "cpu"] = "gpu"
    engine_cache: str | None = None
    min_shapes: ShapeMap | None = None
    opt_shapes: ShapeMap | None = None
    max_shapes: ShapeMap | None = None

    def __post_init__(self) -> None:
        limits = {"version": 1, "max_batch": 0, "max_delay_us": 0, "max_queue": 0, "instances": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value < 2**31):
                raise UsageError(
                    f"{value} is not a whole number from {least} to 2147483647",
                    where=f"--{name.replace('_', '-')}",
                    remedy="give another number",
                )
        if self.device not in ("gpu", "cpu"):
            raise UsageError(f"There is no device {self.device!r}", where="--device", remedy="choose gpu or cpu")
        if self.engine_cache is not None and (not self.engine_cache or self.device == "cpu"):
            raise UsageError(
                "There are no engines to keep", where="--engine-cache", remedy="name a folder, with --device gpu"
            )
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in self.engine_cache or ""):
            raise UsageError(
                "The name of the folder is not UTF-8, which config.pbtxt is",
                where="--engine-cache",
                remedy="give another folder",
            )


@dataclass(frozen=True)
class ServedModel:
    """A model as Triton is to see it.

    Attributes:
        runtime: The backend that runs it.
    """

    name: str
    runtime: Runtime
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    device: Literal["gpu", "cpu"] = "gpu"

    @property
    def tensors(self) -> tuple[EngineTensor, ...]:
        """Inputs and outputs."""
        return self.inputs + self.outputs

    @property
    def profiles(self) -> int:
        """How many optimization profiles it has."""
        return max((len(tensor.ranges) for tensor in self.inputs), default=0)


def batch_axis(tensors: Iterable[EngineTensor]) -> str | None:
    """The dynamic axis that all tensors begin with; None where they begin with different ones, or it has no name."""
    first = {tensor.shape[0] if tensor.shape else None for tensor in tensors}
    name = first.pop() if len(first) == 1 else None
    return name if isinstance(name, str) and name != "?" else None


def max_batch(models: Sequence[ServedModel], asked: int | None) -> int:
    """The largest batch that Triton may make for models that run one after the other; 0 for none.

    Raises:
        UsageError: They do not take batches of that size.
    """
    if asked == 0:
        return 0
    tensors = [tensor for model in models for tensor in model.tensors]
    spans = [_batches(model, index) for model in models for index in range(model.profiles)]
    limit = max((high for _, high in spans), default=None)
    fixed = next((item for item in tensors if not item.shape or isinstance(item.shape[0], int)), None)
    if asked is None:
        return 0 if fixed is not None or batch_axis(tensors) is None else (limit or BATCH_RANGE[2])
    if fixed is not None:
        raise UsageError(
            f"The model takes no batches: the first axis of {fixed.name} is not dynamic",
            where=f"--max-batch {asked}",
            remedy="leave it out, or export the model with a dynamic first axis on every input and output",
        )
    least = min((low for low, _ in spans), default=1)
    if asked < least:
        raise UsageError(
            f"The smallest batch of the optimization profiles is {least}",
            where=f"--max-batch {asked}",
            remedy="give a larger number, or --min-shapes with a smaller one when the engine is built",
        )
    if limit is not None and asked > limit:
        raise UsageError(
            f"The largest batch of the optimization profiles is {limit}",
            where=f"--max-batch {asked}",
            remedy="give a smaller number, or --max-shapes with a larger one when the engine is built",
        )
    return asked


def _batches(model: ServedModel, index: int) -> tuple[int, int]:
    """The smallest and the largest batch that all inputs take in a profile."""
    ranges = [tensor.ranges[index] for tensor in model.inputs if tensor.ranges and tensor.ranges[index].max]
    return max((one.min[0] for one in ranges), default=1), min((one.max[0] for one in ranges), default=1)


def config_text(model: ServedModel, batch: int, config: TritonConfig) -> str:
    """The ``config.pbtxt`` of a model.

    Raises:
        InvalidModelError: Its backend has no tensors of a type, rank or layout.
        UsageError: The options are about batches, and there are none.
    """
    for option in ("max_delay_us", "max_queue"):
        if not batch and getattr(config, option):
            raise UsageError(
                "The option is for the queue in which Triton makes batches, and the model takes none",
                where=f"--{option.replace('_', '-')}",
                remedy="leave it out, or export the model with a dynamic first axis on every input and output",
            )
    message: dict[str, Any] = {
        "name": model.name,
        "platform": _PLATFORMS[model.runtime],
        "backend": model.runtime,
        "default_model_filename": FILES[model.runtime],
        "max_batch_size": batch,
        "input": [_tensor(tensor, batch, model.runtime) for tensor in model.inputs],
        "output": [_tensor(tensor, batch, model.runtime) for tensor in model.outputs],
        "instance_group": [_instances(model, config)],
        "dynamic_batching": _batching(model, batch, config) if batch > 0 else None,
        "optimization": _optimization(model, config),
        "model_warmup": _warmups(model, batch) or None,
    }
    return text(message)


def ensemble_text(
    name: str, steps: Sequence[ServedModel], inputs: Sequence[str], outputs: Sequence[str], batch: int
) -> str:
    """The ``config.pbtxt`` of models that run one after the other; what they share goes by its name."""
    taken = {tensor.name: _plain(tensor, batch, step.runtime) for step in reversed(steps) for tensor in step.inputs}
    given = {tensor.name: _plain(tensor, batch, step.runtime) for step in steps for tensor in step.outputs}
    message = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": batch,
        "input": [taken[item] for item in inputs],
        "output": [given[item] for item in outputs],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": step.name,
                    "model_version": -1,
                    "input_map": entries({tensor.name: tensor.name for tensor in step.inputs}),
                    "output_map": entries({tensor.name: tensor.name for tensor in step.outputs}),
                }
                for step in steps
            ]
        },
    }
    return text(message)


def _plain(tensor: EngineTensor, batch: int, runtime: Runtime) -> dict[str, Any]:
    """Name, type and dimensions of a tensor, as a client sees it.

    Triton wants at least one dimension; without batches ONNX Runtime's backend takes [1] for a scalar. An ensemble has
    these dimensions and no reshape: they must be those of its steps before theirs (``ensemble_utils.cc`` of the core).
    """
    types = TYPES[runtime]
    if tensor.dtype not in types:
        raise _unsupported(tensor, runtime, f"of type {tensor.dtype or 'unknown'}", f"it has {', '.join(types)}")
    if tensor.shape is None or 0 in tensor.shape:
        raise _unsupported(tensor, runtime, "of unknown rank or no elements", "give every tensor a rank and a size")
    dims = [dim if isinstance(dim, int) else -1 for dim in tensor.shape[1 if batch else 0 :]]
    if not dims and runtime == "tensorrt" and not batch:
        raise _unsupported(tensor, runtime, "that are scalars", "give it one dimension")
    return {"name": tensor.name, "data_type": Word(types[tensor.dtype]), "dims": dims or [1]}


def _tensor(tensor: EngineTensor, batch: int, runtime: Runtime) -> dict[str, Any]:
    """A tensor of a model. Of rank 1, the batch is all it has, and the reshape takes the dimension away again."""
    found = _plain(tensor, batch, runtime)
    if batch and len(tensor.shape or ()) == 1:
        found["reshape"] = {"shape": []}
    if tensor.layout != "chw":
        if len(found["dims"]) != _NON_LINEAR_RANK:
            raise _unsupported(
                tensor, runtime, f"in the layout {tensor.layout} that have no batch", "build it with a dynamic batch"
            )
        found["is_non_linear_format_io"] = True
    return found


def _unsupported(tensor: EngineTensor, runtime: Runtime, what: str, remedy: str) -> InvalidModelError:
    return InvalidModelError(
        f"Triton's {runtime} backend has no tensors {what}", where=f"tensor {tensor.name}", remedy=remedy
    )


def _instances(model: ServedModel, config: TritonConfig) -> dict[str, Any]:
    group: dict[str, Any] = {"count": config.instances, "kind": Word(f"KIND_{model.device.upper()}")}
    if model.runtime == "tensorrt" and model.profiles > 1:
        group["profile"] = [str(index) for index in range(model.profiles)]
    return group


def _best_batches(model: ServedModel, batch: int) -> list[int]:
    """The batches that the profiles are fastest at, without the largest one, which needs no preference."""
    best = {shape.opt[0] for tensor in model.inputs for shape in tensor.ranges if shape.opt}
    return sorted(size for size in best if 1 < size < batch)


def _batching(model: ServedModel, batch: int, config: TritonConfig) -> dict[str, Any]:
    return {
        "preferred_batch_size": [*best, batch] if (best := _best_batches(model, batch)) else None,
        "max_queue_delay_microseconds": config.max_delay_us or None,
        "default_queue_policy": {"max_queue_size": config.max_queue} if config.max_queue else None,
    }


def _optimization(model: ServedModel, config: TritonConfig) -> dict[str, Any] | None:
    """TensorRT inside ONNX Runtime.

    Without ``precision_mode`` its network is strongly typed: it computes in the types of the graph, which are those
    that trtopt chose (``fp16_enable_ || int8_enable_`` in onnxruntime's tensorrt_execution_provider.cc).
    """
    if model.runtime != "onnxruntime" or model.device != "gpu":
        return None
    parameters: dict[str, str] = {}
    if model.profiles:
        dynamic = [item for item in model.inputs if any(isinstance(dim, str) for dim in item.shape or ())]
        for item in dynamic:
            if "," in item.name:
                raise InvalidModelError(
                    "ONNX Runtime reads a comma in the name of an input as the end of its shape",
                    where=f"input {item.name}",
                    remedy="export the model with another name for it",
                )
        for end in ("min", "opt", "max"):
            shapes = (f"{item.name}:{'x'.join(map(str, getattr(item.ranges[0], end)))}" for item in dynamic)
            parameters[f"trt_profile_{end}_shapes"] = ",".join(shapes)
    if config.engine_cache is not None:
        parameters |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": config.engine_cache}
    accelerator = {"name": "tensorrt", "parameters": entries(parameters) or None}
    return {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}}


def _warmups(model: ServedModel, batch: int) -> list[dict[str, Any]]:
    """One request of zeros for each profile and each batch size worth it that the profile takes, because a model whose
    warm-up fails is not loaded; none where a size is not known."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(max(model.profiles, 1)):
        inputs = {}
        for tensor in model.inputs:
            shape = tensor.ranges[index].opt if tensor.ranges else (tensor.shape or ())
            dims = shape[1 if batch else 0 :]
            if not all(isinstance(dim, int) for dim in dims):
                return []
            data_type = Word(TYPES[model.runtime][tensor.dtype])
            inputs[tensor.name] = {"data_type": data_type, "dims": list(dims) or [1], "zero_data": True}
        low, high = _batches(model, index) if model.profiles and batch else (1, max(batch, 1))
        high = min(high, max(batch, 1))
        for size in sorted(size for size in {low, *_best_batches(model, batch), high} if low <= size <= high):
            name = f"batch_{size}" if model.profiles < 2 else f"profile_{index}_batch_{size}"
            found[name] = {"name": name, "batch_size": size, "inputs": entries(inputs)}
    return list(found.values())
