"""Graphs run by ONNX Runtime on the CPU: for calibration, references and verification."""

from __future__ import annotations

import _thread
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError, ResourceError
from trtopt.support._lazy import require
from trtopt.support.dequantize import fold_unknown
from trtopt.support.dynamic_fp4 import write_out_dynamic_fp4
from trtopt.support.nms_plugins import written_out

Feeds = Mapping[str, np.ndarray]
"""Arrays by input name: one call's inputs."""

_Session = TypeVar("_Session", bound="OrtSession")

RUN_LIMIT_S = 1800.0
"""What one run may take. A ``Loop`` need not end, and a file of a kilobyte may ask for a day's work; 7 billion
parameters over 2048 tokens, 3e13 flop, are ten minutes at the 50 GFLOP/s of two cores."""

_TICK_S = 0.2
_INLINE_BYTES = 1024
"""Initializers up to this size stay in the serialised model: ONNX Runtime folds such constants at load."""

LARGE_BYTES = 1 << 30
"""Weights above this sum are held once. ONNX Runtime else copies them all, packed for its kernels: 1.2 s per GiB when a
session is made, for runs that take 0.1 s less (64 rows)."""

_WRONG_FOR_FP8 = ("ReluQuantRewrite", "ClipQuantRewrite")
"""They take the FP8 zero point 0 for the lowest UINT8 and remove a ReLU or Clip that the quantizer does not stand for
(ONNX Runtime 1.31)."""

_FAILS_ON_FP16 = ("MatmulTransposeFusion", "AttentionFusion")
"""The first dies of SIGSEGV on a product of a Transpose of FP16 with an operand of lower rank, the second refuses
attention of a map whose queries are multiplied by a number of FP16 (ONNX Runtime 1.31)."""

_BY_REFERENCE = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8}
    | {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT8E4M3FN}
)

_COPIES_WEIGHTS = ("ConstantFolding", "FuseFp16InitializerToFp32NodeTransformer")
"""They store a large weight that is cast or transposed a second time."""

_NEW_OPSET = re.compile(r"Opset (\d+) is under development.*domain ai\.onnx is till opset (\d+)", re.DOTALL)
"""What ONNX Runtime says of a model whose opset it does not know."""

_limit_s = [RUN_LIMIT_S]
"""Seconds that runs of this process may take, but those of sessions that serve."""


def limit_runs(seconds: float | None) -> None:
    """Stop runs of the models that are worked on after ``seconds``; None for :data:`RUN_LIMIT_S`."""
    _limit_s[0] = seconds or RUN_LIMIT_S


_share = [0]
"""Threads of each session of this process; 0 lets ONNX Runtime choose, which takes one for each core of the machine."""


def share_cores(threads: int) -> None:
    """Give the sessions of this process, one of several on the machine, so many threads each."""
    _share[0] = threads


class OrtSession:
    """A model loaded into ONNX Runtime's CPU provider.

    Args:
        outputs: Names of the values to return, which may be intermediate; None for the graph's outputs.
        keep_qdq: Run QuantizeLinear and DequantizeLinear as they stand, instead of moving them and fusing them into
            integer kernels.
        threads: Threads within an operator; 0 for those of :func:`share_cores`, else ONNX Runtime chooses.
        fuse: Whether ONNX Runtime may rewrite the graph; for one run of a large graph that takes longer than it saves.
        arena: Whether freed memory is kept for the next run; of many sessions in turn, each would keep its own.
        brief: Whether a few runs are all that is asked of it. Weights are not packed then: of a ViT-B that takes 0.3 s,
            and saves 0.01 s of a run of 0.11.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        InvalidModelError: ONNX Runtime cannot load the graph.
    """

    _packs = False

    def __init__(
        self,
        model: ir.Model,
        outputs: Sequence[str] | None = None,
        *,
        keep_qdq: bool = True,
        threads: int = 0,
        fuse: bool = True,
        arena: bool = True,
        brief: bool = False,
    ) -> None:
        ort = require("onnxruntime", "cpu", "run models on the CPU")
        ort.disable_telemetry_events()
        options = _options(ort, threads, arena=arena)
        if not fuse:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._adjust(options)
        self._new_run_options = ort.RunOptions
        self._idle: list[_LimitedRun] = []
        if keep_qdq:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._weights: dict[str, np.ndarray] = {}
        try:
            whole = written_out(model)
            clone = whole.clone() if outputs is None else with_outputs(whole, outputs)
            write_out_dynamic_fp4(clone)
            fold_unknown(clone)
            _widen_bf16_borders(clone)
            _shield_outputs(clone)
            mapped = None if self._packs else _folder_of_large(clone)
            light, self._weights = _detach_weights(clone, mapped)
            values = {name: _by_reference(ort, array) for name, array in self._weights.items()}
            if brief or mapped is not None:
                options.add_session_config_entry("session.disable_prepacking", "1")
            disabled = [*_WRONG_FOR_FP8, *(_FAILS_ON_FP16 if _turns_fp16(light) else ())]
            if mapped is not None:
                disabled += _COPIES_WEIGHTS
                _hold_once(options, mapped, values)
            own = [name for name in values if not _is_in(light.graph.initializers[name].const_value, mapped)]
            options.add_external_initializers(own, [values[name] for name in own])
            data = ir.to_proto(light).SerializeToString()
            self._session = ort.InferenceSession(
                data, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
            )
        except InvalidModelError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise _not_loaded(ort, model, error) from error
        self.output_names: tuple[str, ...] = tuple(item.name for item in self._session.get_outputs())
        self._call = self._runner().run
        self._input_names = frozenset(item.name for item in self._session.get_inputs())

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``; what the graph gives as BF16 comes as float32.

        Args:
            feeds: Arrays by input name. Names the graph lacks are left out: a part of a model runs on the samples of
                the whole.

        Raises:
            InvalidModelError: The model fails on these inputs.
            ResourceError: It does not end within the seconds of :func:`limit_runs`.
        """
        return self.run_exactly(
            {name: _without_bf16(array) for name, array in feeds.items() if name in self._input_names}
        )

    def run_exactly(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """:meth:`run` of the graph's inputs and nothing else, none of them BF16."""
        run = self._idle.pop() if self._idle else _LimitedRun(self._new_run_options())
        limit_s = self._run_limit_s()
        run.deadline = time.monotonic() + limit_s
        if not _LIMIT.is_watching:
            _LIMIT.start()
        try:
            found: list[np.ndarray] = self._call(self.output_names, feeds, run.options)
            run.deadline = math.inf
            if not run.options.terminate:  # in the very moment in which it ended
                self._idle.append(run)
            return found
        except Exception as error:
            if run.options.terminate:
                raise ResourceError(
                    f"The model did not end within {limit_s:g} seconds and was stopped",
                    where="ONNX Runtime",
                    remedy="check the conditions and trip counts of its loops; or give smaller shapes, or more time "
                    "(--run-limit)",
                ) from error
            shapes = ", ".join(f"{name}:{value.dtype}{list(value.shape)}" for name, value in feeds.items())
            raise InvalidModelError(
                f"The model fails on an input: {_first_lines(error)}",
                where=shapes,
                remedy="check the shapes of the samples; if they are right, the model contradicts itself: it fails in "
                "ONNX Runtime as it is",
            ) from error

    def _adjust(self, options: Any) -> None:
        """Set the options in which kinds of sessions differ."""
        # Two sessions in turn: the threads of the one that waits must not spin on the cores of the other.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def _run_limit_s(self) -> float:
        return _limit_s[0]

    def _runner(self) -> Any:
        """What runs the graph."""
        return self._session

    def close(self) -> None:
        """Free the session's memory."""
        self._session = self._call = None
        self._weights = {}

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _LimitedRun:
    """What one run at a time of a session is stopped by.

    Attributes:
        deadline: When it is, by the monotonic clock.
    """

    def __init__(self, options: Any) -> None:
        self.options = options
        self.deadline = math.inf
        _LIMIT.add(self)


class _RunLimit:
    """Stops runs that take too long: one thread looks at all of them, since starting one for each takes longer than
    many a run. ONNX Runtime looks at the request between operators, those of a loop's body included."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[_LimitedRun] = weakref.WeakSet()
        self._reset()
        if hasattr(os, "register_at_fork"):  # the lock may be held in that moment, and the thread is left behind
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._runs = weakref.WeakSet(self._runs)  # the old one may be in the middle of something
        self.is_watching = False

    def add(self, run: _LimitedRun) -> None:
        """Look at a run, too, as long as somebody else holds it."""
        with self._lock:
            self._runs.add(run)

    def runs(self) -> list[_LimitedRun]:
        """All of them."""
        with self._lock:  # a set cannot be read while another thread adds to it
            return list(self._runs)

    def start(self) -> None:
        """Start the thread that looks at the runs."""
        with self._lock:
            if not self.is_watching:
                # A signal handler that raises while threading.Thread.start waits leaves locks behind (CPython 3.10).
                _thread.start_new_thread(self._watch, ())
                self.is_watching = True

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            for run in self.runs():
                if now > run.deadline:
                    run.options.terminate = True


_LIMIT = _RunLimit()


class ServingSession(OrtSession):
    """A session that serves: its threads spin while they wait (ONNX Runtime's default).

    Q/DQ runs as it stands, so that a service gets the numbers that verification judged, on every CPU.
    """

    _packs = True

    def _adjust(self, options: Any) -> None:
        """Keep ONNX Runtime's defaults."""

    def _run_limit_s(self) -> float:
        return RUN_LIMIT_S

    def _runner(self) -> Any:
        """Without the second check of the names, in Python: 3 of 28 us of a network of 25 us."""
        return getattr(self._session, "_sess", self._session)


class TimedSession(OrtSession):
    """A session whose time is measured: every node as the graph has it, threads that spin while they wait (ONNX
    Runtime's default).

    Args:
        profile: The beginning of the path of the file into which ONNX Runtime writes a profile of all runs; None for
            no profile."""

    _packs = True

    def __init__(self, model: ir.Model, *, threads: int, profile: Path | None = None) -> None:
        self._profile = profile
        super().__init__(model, threads=threads, fuse=False)

    def _adjust(self, options: Any) -> None:
        if self._profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self._profile)

    def end_profiling(self) -> Path:
        """End the profile; the file that holds it."""
        return Path(self._session.end_profiling())


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A clone of ``model`` whose graph outputs are ``names`` (values of the main graph), in that order."""
    clone = model.clone()
    values = {value.name: value for value in clone.graph.inputs}
    values.update((value.name, value) for value in clone.graph.initializers.values())
    values.update((value.name, value) for node in clone.graph for value in node.outputs)
    clone.graph.outputs[:] = [values[name] for name in names]
    return clone


def _widen_bf16_borders(model: ir.Model) -> None:
    """Make inputs and outputs of type BF16 FP32 with a Cast, in place: ONNX Runtime's numpy interface has no BF16."""
    graph = model.graph
    for value in graph.inputs:
        if value.dtype is ir.DataType.BFLOAT16:
            uses = list(value.uses())
            cast = _cast(value, ir.DataType.BFLOAT16)
            for node, index in uses:
                node.replace_input_with(index, cast.outputs[0])
            value.type = ir.TensorType(ir.DataType.FLOAT)
            if len(graph):
                graph.insert_before(graph[0], cast)
            else:
                graph.append(cast)
    for position, value in enumerate(graph.outputs):
        if value.dtype is ir.DataType.BFLOAT16:
            cast = _cast(value, ir.DataType.FLOAT)
            cast.outputs[0].name, value.name = value.name, f"{value.name}_bf16"
            graph.append(cast)
            graph.outputs[position] = cast.outputs[0]


def _shield_outputs(model: ir.Model) -> None:
    """Give outputs that nodes read too a copy of their own, in place, where the graph quantizes.

    ONNX Runtime 1.31 moves Q/DQ backwards over a Transpose to a value with one reader, and gives the quantized value as
    the output too, whatever ``session.disable_quant_qdq`` says. A second reader keeps it from that.
    """
    graph = model.graph
    if not any(node.op_type == "QuantizeLinear" for node in graph):
        return
    for position, value in enumerate(graph.outputs):
        if value.uses() and value.producer() is not None:
            copy = ir.node("Identity", [value], name=f"{value.name}_output")
            output = copy.outputs[0]
            output.name, value.name = value.name, f"{value.name}_inside"
            output.type, output.shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[position] = output


def _turns_fp16(model: ir.Model) -> bool:
    """Whether a Transpose of FP16 is in the graph or one nested in it."""
    return any(
        node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].dtype is ir.DataType.FLOAT16
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    )


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=f"{value.name}_border")
    node.outputs[0].name = f"{value.name}_border"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(dtype), value.shape
    return node


def _without_bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


def _options(ort: Any, threads: int, *, arena: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or _share[0]
    # Patterns keep a block of memory per input shape, for no gain in time where most time is convolutions.
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = arena
    return options


def _folder_of_large(model: ir.Model) -> str | None:
    """Where the files of weights lie that are held once, empty for none; None for weights that are no more than
    :data:`LARGE_BYTES`."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    if sum(tensor.nbytes for tensor in tensors) <= LARGE_BYTES:
        return None
    return next((str(tensor.base_dir) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)), "")


def _detach_weights(model: ir.Model, mapped: str | None) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """Take the large initializers out of ``model`` (which is changed), to be handed to ONNX Runtime by reference.

    Serialising them would copy every weight three times, and a protobuf ends at 2 GiB. Memory-mapped weights stay so;
    those of the folder ``mapped`` keep the name of their file.
    """
    weights: dict[str, np.ndarray] = {}
    inputs = {value.name for value in model.graph.inputs}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _INLINE_BYTES or tensor.dtype not in _BY_REFERENCE:
            if isinstance(tensor, ir.ExternalTensor):  # ONNX Runtime reads no files for a model it gets as bytes
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
            continue
        if name in inputs or not value.uses():  # ONNX Runtime drops unused ones at load, then cannot replace them
            continue
        weights[name] = np.ascontiguousarray(tensor.numpy())
        if not _is_in(tensor, mapped):
            value.const_value = ir.ExternalTensor(
                "by-reference", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
    return model, weights


def _is_in(tensor: ir.TensorProtocol | None, folder: str | None) -> bool:
    """Whether a tensor lies in a file of this folder."""
    return bool(folder) and isinstance(tensor, ir.ExternalTensor) and str(tensor.base_dir) == folder


def _hold_once(options: Any, folder: str, values: Mapping[str, Any]) -> None:
    """Let a session compute with these weights as they lie in memory.

    Those of the model's files it maps itself where it reads them beforehand; the others it copies for the moment in
    which it is made.
    """
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    for name, value in values.items():
        options.add_initializer(name, value)


def _by_reference(ort: Any, array: np.ndarray) -> Any:
    """An OrtValue on the memory of ``array``. Numpy lacks FP8: it goes as bytes, with its type said."""
    if array.dtype != ml_dtypes.float8_e4m3fn:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), int(ir.DataType.FLOAT8E4M3FN))


def _not_loaded(ort: Any, model: ir.Model, error: Exception) -> InvalidModelError:
    said = f"ONNX Runtime cannot load the model: {_first_lines(error)}"
    remedy = "check the node the message names; operators of custom domains cannot be calibrated or verified"
    opsets = _NEW_OPSET.search(str(error))
    if opsets is not None:
        said = f"ONNX Runtime {ort.__version__} knows opsets up to {opsets[2]}, and the model has {opsets[1]}"
        remedy = f"install a newer onnxruntime, or export the model with opset {opsets[2]}"
    return InvalidModelError(said, where=str(model.graph.name), remedy=remedy)


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:600]
