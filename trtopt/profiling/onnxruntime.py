"""Every node of a model timed on the CPU, by ONNX Runtime's own profiler.

The graph runs as it is written (ONNX Runtime's rewriting is off), one node after the other. The profiler cuts times off
to whole microseconds, and they hold part of its own work, which is more than that: about two microseconds a node
(``CpuSpec.profiled_us``). The times are left as they are, and predictions are made for them; an inference without
profiling is timed by itself.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from trtopt.errors import UsageError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import all_nodes, constant_tensor_of, subgraphs_of
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.cpu import available_threads
from trtopt.profiling.measured import MeasuredLayer, Measurement, RunLimits, RunTimes, spread, timed, until_stable
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.report.schema.profile import ProfileSource
from trtopt.roofline.node_work import PRODUCT_KINDS, GraphTypes, dequantized, work_of_node
from trtopt.roofline.onnx_layers import repeated
from trtopt.roofline.work import Work
from trtopt.source.opset import convert
from trtopt.support._lazy import require
from trtopt.support.ort_session import Feeds, TimedSession
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder

MOST_EVENTS = 1_000_000
"""Events that ONNX Runtime keeps; it drops the rest without a word."""

_NODE_SUFFIX = "_kernel_time"
_GRAPH = "SequentialExecutor::Execute"
_RUN = "model_run"

Tensor = tuple[str, tuple[int, ...]]
"""ONNX Runtime's name of a type, and a shape."""


@dataclass(frozen=True)
class NodeKernel:
    """A node that ran, as it was at the first time; inputs that were packed beforehand are left out.

    Without a name (``is_unnamed``) ONNX Runtime calls it by its operator and a number.
    """

    op: str
    is_unnamed: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """One inference.

    Attributes:
        own_us: By node in the order they began, what it took without the graphs nested in it, over all its executions.
        executions: By node, how often it ran.
    """

    own_us: Mapping[str, int]
    executions: Mapping[str, int]


@dataclass(frozen=True)
class OrtProfile:
    """The inferences of a session in order, one that is cut off left out; and the nodes that ran, by name."""

    runs: tuple[Run, ...]
    kernels: Mapping[str, NodeKernel]


@dataclass
class _Recorder:
    """The events of one inference, in the order in which they end: a nested graph before the node that holds it."""

    own_us: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    executions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    began: dict[str, tuple[int, int]] = field(default_factory=dict)
    nested: list[tuple[int, int]] = field(default_factory=list)

    def node(self, name: str, at: int, us: int) -> None:
        # The owner of a nested graph begins before it, or in the same microsecond: then the longer one came first.
        self.began.setdefault(name, (at, -us))
        self.executions[name] += 1
        while self.nested and self.nested[-1][0] >= at:
            us -= self.nested.pop()[1]
        self.own_us[name] += max(us, 0)

    def run(self) -> Run:
        ordered = sorted(self.began, key=self.began.__getitem__)
        return Run({name: self.own_us[name] for name in ordered}, dict(self.executions))


def read_profile(path: Path) -> OrtProfile:
    """Read the profile in a file."""
    runs: list[Run] = []
    kernels: dict[str, NodeKernel] = {}
    recorder = _Recorder()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if not text.startswith("{"):  # the brackets around the list
                continue
            event = json.loads(text)
            name = event["name"]
            if event["cat"] == "Node" and name.endswith(_NODE_SUFFIX):
                name = name.removesuffix(_NODE_SUFFIX)
                if name not in kernels:
                    kernels[name] = _kernel(name, event["args"])
                recorder.node(name, event["ts"], event["dur"])
            elif name == _GRAPH:
                recorder.nested.append((event["ts"], event["dur"]))
            elif name == _RUN:
                runs.append(recorder.run())
                recorder = _Recorder()
    return OrtProfile(tuple(runs), kernels)


def _kernel(name: str, args: Mapping[str, Any]) -> NodeKernel:
    op = args["op_name"]
    inputs, outputs = (_tensors(args[f"{side}_type_shape"]) for side in ("input", "output"))
    return NodeKernel(op, name == f"{op}_{args['node_index']}", inputs, outputs)


def _tensors(items: list[dict[str, list[int]]]) -> tuple[Tensor, ...]:
    return tuple((dtype, tuple(shape)) for item in items for dtype, shape in item.items())


_EXPANDED_DOMAIN = "trtopt.expanded"


def expand(model: ir.Model, names: Collection[str]) -> int:
    """Put the definition that ONNX gives of an operator in the place of nodes of the default domain, in place.

    The model's nodes have unique names; those among ``names`` are replaced, by parts called ``NAME_0``, ``NAME_1``, ...
    Those whose operator has no definition by others stay. Returns the number of nodes replaced.
    """
    opset = model.graph.opset_imports[""]
    for node in all_nodes(model.graph):
        body = _definition(node, opset) if node.name in names else None
        if body is None:
            continue
        function = ir.serde.deserialize_function(body)
        for name, attribute in _defaults(node, opset).items():
            node.attributes.setdefault(name, attribute)
        convert(function.graph, body.opset_import[0].version, opset)
        function.opset_imports[""] = opset
        for index, part in enumerate(all_nodes(function.graph)):
            part.name = f"{node.name}_{index}"
        function.domain = node.domain = _EXPANDED_DOMAIN
        function.name = node.op_type = str(node.name)
        model.functions[function.identifier()] = function
    count = len(model.functions)
    if count:
        model.graph.opset_imports[_EXPANDED_DOMAIN] = 1
        common_passes.InlinePass()(model)
        model.functions.clear()
        del model.graph.opset_imports[_EXPANDED_DOMAIN]
    return count


def _definition(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """The operator's definition by others, for this node; None without one, and for one that maps a nested graph."""
    if node.domain != "" or subgraphs_of(node) or not onnx.defs.has(node.op_type, opset, node.domain):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    body = onnx.FunctionProto()
    if schema.has_function:
        body.ParseFromString(schema.get_function_with_opset_version(_newest(schema.function_opset_versions, opset)))
        return body
    if not schema.has_context_dependent_function:
        return None
    version = _newest(schema.context_dependent_function_opset_versions, opset)
    types = [_type(value) for value in node.inputs]
    found = schema.get_context_dependent_function_with_opset_version(
        version, ir.serde.serialize_node(node).SerializeToString(), types
    )
    body.ParseFromString(found)
    return body if body.node else None


def _defaults(node: ir.Node, opset: int) -> dict[str, ir.Attr]:
    """What the attributes of a node's operator are where the node does not say; definitions refer to all of them."""
    attributes = onnx.defs.get_schema(node.op_type, opset, node.domain).attributes
    found = {name: attribute.default_value for name, attribute in attributes.items()}
    return {name: ir.serde.deserialize_attribute(value) for name, value in found.items() if value.name}


def _newest(versions: Sequence[int], opset: int) -> int:
    """The version of a definition that a model of ``opset`` uses."""
    return max(version for version in versions if version <= opset)


def _type(value: ir.Value | None) -> bytes:
    """A value's type as a serialised ``TypeProto``; empty where the input is left out."""
    proto = onnx.TypeProto()
    if value is not None and value.dtype is not None:
        proto.tensor_type.elem_type = int(value.dtype)
    serialized: bytes = proto.SerializeToString()
    return serialized


_DTYPES = {
    ir.DataType.FLOAT: "Float",
    ir.DataType.FLOAT16: "Half",
    ir.DataType.BFLOAT16: "BFloat16",
    ir.DataType.FLOAT8E4M3FN: "FP8",
    ir.DataType.FLOAT8E5M2: "FP8",
    ir.DataType.FLOAT8E8M0: "E8M0",
    ir.DataType.FLOAT4E2M1: "FP4",
    ir.DataType.UINT8: "UInt8",
}
"""The names that compilers give types, where they are not those of ONNX with a capital letter."""

_KINDS = {"gemm": "gemm", "conv": "conv", "attention": "mha"}
_FP32 = GraphTypes(Precision.FP32)


class NodeLayers:
    """Describes the nodes of a model that ran.

    Args:
        model: A model that the caller owns: its values get the types and shapes of the run. Every node has a unique
            name.
        shapes: Static shapes by value name, as far as they are known; those of the run are added.
        kernels: By node name, what ran; an operator that ran by its parts is left out.
    """

    def __init__(
        self, model: ir.Model, shapes: Mapping[str, tuple[int, ...]], kernels: Mapping[str, NodeKernel]
    ) -> None:
        self._nodes = {str(node.name): node for node, _ in cost.nodes_with_counts(model.graph, {})}
        self._shapes = dict(shapes)
        self._kernels = kernels
        for name, kernel in kernels.items():
            values = [value for value in self._nodes[name].outputs if value.name]
            if len(values) == len(kernel.outputs):  # values that are no tensors are not listed
                for value, (text, shape) in zip(values, kernel.outputs, strict=True):
                    self._shapes[str(value.name)] = shape
                    dtype = _data_type(text)
                    value.type = value.type if dtype is None else ir.TensorType(dtype)

    def work(self, name: str, executions: int) -> Work | None:
        """What a node had to do, as it ran, in all its executions; None where its cost or a shape is not known.

        ONNX Runtime computes in FP32 what it has no FP16 kernel for, behind casts of its own, and, its fusions being
        off, what stands behind a DequantizeLinear.
        """
        node = self._nodes[name]
        given = list(node.inputs)
        for index, value in self._widened(node).items():
            node.replace_input_with(index, value)
        found = work_of_node(node, self._shapes, _FP32)
        for index, original in enumerate(given):
            node.replace_input_with(index, original)
        return None if found is None else repeated(found, executions)

    def info(self, name: str, *, runs: bool) -> LayerInfo:
        """The layer of a node; ``runs`` says whether it ran."""
        node = self._nodes[name]
        read = [value for value in dict.fromkeys(node.inputs) if value is not None and value.name]
        constant = [value for value in read if constant_tensor_of(value) is not None]
        return LayerInfo(
            name=name,
            type=node.op_type,
            onnx_nodes=(name,),
            inputs=self._tensors(value for value in read if value not in constant),
            outputs=self._tensors(value for value in node.outputs if value.name),
            constants=self._tensors(constant),
            is_kernel=runs,
            kind=_kind(node) if runs else "none",
        )

    def _tensors(self, values: Iterable[ir.Value]) -> tuple[TensorInfo, ...]:
        return tuple(self._tensor(value) for value in values)

    def _tensor(self, value: ir.Value) -> TensorInfo:
        name = str(value.name)
        shape = self._shapes[name] if name in self._shapes else _declared(value)
        return TensorInfo(name, shape, _dtype_name(value.dtype))

    def _widened(self, node: ir.Node) -> dict[int, ir.Value]:
        """Stand-ins for the inputs that the node reads in FP32 although the graph has them in another type."""
        kernel = self._kernels.get(str(node.name))
        types = {text for text, _ in kernel.inputs} if kernel is not None else set()
        no_fp16 = "float" in types and "float16" not in types
        return {
            index: ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
            for index, value in enumerate(node.inputs)
            if value is not None
            and (dequantized(value) is not None or (no_fp16 and value.dtype is ir.DataType.FLOAT16))
        }


def added_layer(name: str, kernel: NodeKernel, executions: int) -> tuple[LayerInfo, Work]:
    """A node that is not the model's: one that ONNX Runtime added, as a rule a Cast around what it computes in FP32."""
    info = LayerInfo(
        name=name,
        type=kernel.op,
        onnx_nodes=(),
        inputs=tuple(_seen_tensor(tensor) for tensor in kernel.inputs),
        outputs=tuple(_seen_tensor(tensor) for tensor in kernel.outputs),
        kind="pointwise" if kernel.op == "Cast" else "other",
    )
    work = Work("memory", 0, _bytes(kernel.inputs), 0, _bytes(kernel.outputs), Precision.FP32)
    return info, repeated(work, executions)


def _seen_tensor(tensor: Tensor) -> TensorInfo:
    text, shape = tensor
    return TensorInfo("", shape, _dtype_name(_data_type(text)))


def _bytes(tensors: Sequence[Tensor]) -> int:
    sized = [(dtype, shape) for text, shape in tensors if (dtype := _data_type(text)) not in (None, ir.DataType.STRING)]
    return sum(math.ceil(math.prod(shape) * dtype.bitwidth / 8) for dtype, shape in sized if dtype is not None)


def _data_type(text: str) -> ir.DataType | None:
    """The type that ONNX Runtime calls ``text``."""
    return ir.DataType.__members__.get(text.upper())


def _dtype_name(dtype: ir.DataType | None) -> str:
    return "" if dtype is None else _DTYPES.get(dtype, dtype.name.capitalize())


def _declared(value: ir.Value) -> tuple[int, ...]:
    """The shape that the model gives a value, -1 where it does not say."""
    return tuple(dim if isinstance(dim, int) else -1 for dim in value.shape or ())


def _kind(node: ir.Node) -> str:
    kind = PRODUCT_KINDS.get(node.op_type) if node.domain == "" else None
    if kind is not None:
        return _KINDS.get(kind, "other")
    return "pointwise" if node.op_type in cost.POINTWISE else "other"


_EVENTS = 100_000
"""Events of the runs that count, about: 70 MB of the profiler's file."""

_LABEL = re.compile(r"n(\d+)(?:_\d+)*")
"""Names of nodes while they are timed: their place in the model, and that of a part in an operator's definition."""

_LIMITS = RunLimits()

_BUSY = 0.5
"""Cores taken by others from which on a measurement is said to be disturbed."""


def measure(artifact: ModelArtifact, feeds: Feeds, *, threads: int, limits: RunLimits = _LIMITS) -> Measurement:
    """Time every node of a model, and the model as a whole.

    A node's time is the mean of the middle half of the runs: single runs that the system disturbed do not count, and
    it is finer than the profiler's microseconds where the runs differ. The time of an ``If``, ``Loop`` or ``Scan`` is
    its own; the nodes inside have theirs, over all iterations of an inference. What ran nothing (a ``Constant``, the
    branch not taken) is listed with 0 us. A node that ONNX Runtime added is a layer without nodes, and an operator
    that it runs by the parts of its definition has their sum.

    Args:
        artifact: The model.
        feeds: An array for each input; the control flow and the shapes that depend on data are those of these values.
        threads: Threads within an operator.
        limits: When to stop: for the inferences without profiling, and again for those with it.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        InvalidModelError: ONNX Runtime cannot load the model, or the model fails on these inputs.
        UsageError: An input is unknown or does not fit, or the inferences run too many nodes.
    """
    shapes = static_shapes(artifact.model, {name: array.shape for name, array in feeds.items()})
    load = os.getloadavg()[0]
    with TimedSession(artifact.model, threads=threads) as session:
        whole = until_stable(timed(lambda: session.run(feeds)), limits)
    profile, profiled = _trace(artifact.model, feeds, threads, limits)
    conditions = {
        "threads": threads,
        "graph_optimizations": "off",
        "load_average": round(load, 2),
        "stable": whole.stable and profiled.stable,
        "input_shapes": {name: list(array.shape) for name, array in feeds.items()},
    }
    source = ProfileSource(
        origin="onnxruntime",
        files={} if artifact.path is None else {"model": str(artifact.path)},
        version=str(require("onnxruntime", "cpu", "run models on the CPU").__version__),
        runs=len(profile.runs),
        launching="profile",
        conditions=conditions,
    )
    return Measurement(
        source=source,
        layers=tuple(_layers(artifact.model, profile, shapes)),
        end_to_end_us=whole.median_us,
        end_to_end_spread_us=whole.spread_us,
        warnings=(*_disturbances(whole, profiled, load + threads - available_threads()), *_unmatched(profile)),
    )


def _trace(model: ir.Model, feeds: Feeds, threads: int, limits: RunLimits) -> tuple[OrtProfile, RunTimes]:
    """Profiled inferences of the model, whose nodes are named by their place: ``n0``, ``n1``, ..."""
    clone = model.clone()
    for index, node in enumerate(_nodes(clone)):
        node.name = f"n{index}"
    while True:
        first, _ = _profiled(clone, feeds, threads, replace(limits, warm_up_runs=0, warm_up_seconds=0, max_runs=1))
        silent = {str(node.name) for node in _nodes(clone)} - first.kernels.keys()
        if not _parts(first) or not expand(clone, silent):
            break
    events = sum(first.runs[0].executions.values())
    most = min(limits.max_runs, max(_EVENTS // max(events, 1), 1))
    return _profiled(clone, feeds, threads, replace(limits, max_runs=most))


def _parts(profile: OrtProfile) -> list[str]:
    """Operators of the nodes without a name: ONNX Runtime put them in the place of an operator it has no kernel for."""
    return sorted({kernel.op for kernel in profile.kernels.values() if kernel.is_unnamed})


def _profiled(model: ir.Model, feeds: Feeds, threads: int, limits: RunLimits) -> tuple[OrtProfile, RunTimes]:
    """Run until stable, with profiling; the runs that count, and what they took."""
    with TemporaryFolder("profile-") as folder:
        with TimedSession(model, threads=threads, profile=Path(folder) / "runs") as session:
            samples = until_stable(timed(lambda: session.run(feeds)), limits)
            file = session.end_profiling()
        profile = read_profile(file)
    if len(profile.runs) < len(samples.us):
        raise UsageError(
            f"ONNX Runtime keeps the times of {MOST_EVENTS} nodes, and the inferences to be timed run more",
            where=str(model.graph.name),
            remedy="give inputs for which loops run fewer iterations",
        )
    return replace(profile, runs=profile.runs[-len(samples.us) :]), samples


def _nodes(model: ir.Model) -> list[ir.Node]:
    """Every node, the nested ones after their owner."""
    return [node for node, _ in cost.nodes_with_counts(model.graph, {})]


def _layers(model: ir.Model, profile: OrtProfile, shapes: Mapping[str, tuple[int, ...]]) -> list[MeasuredLayer]:
    """The model's nodes and those that ONNX Runtime added, in the order they began; what ran nothing stands behind the
    node before it in the model."""
    names = [str(node.name) for node in _nodes(model)]
    table = _Table.of(profile, names)
    describe = NodeLayers(model.clone(), shapes, table.whole)
    found: list[tuple[int, MeasuredLayer]] = []
    place = -1
    for node in _nodes(model):
        name = str(node.name)
        place = table.places.get(name, place)
        us = table.own_us.get(name)
        work = None if us is None else describe.work(name, table.executions[name])
        found.append((place, _layer(describe.info(name, runs=us is not None), work, us)))
    for name, kernel in table.added.items():
        info, work = added_layer(name, kernel, table.executions[name])
        found.append((table.places[name], _layer(info, work, table.own_us[name])))
    return [layer for _, layer in sorted(found, key=lambda item: item[0])]


def _layer(info: LayerInfo, work: Work | None, us: np.ndarray | None) -> MeasuredLayer:
    """A layer with its times; None for one that did not run."""
    if us is None:
        return MeasuredLayer(info, info.type, None, 0.0)
    ordered = np.sort(us)
    quarter = len(us) // 4
    middle = ordered[quarter : len(us) - quarter]
    return MeasuredLayer(info, info.type, work, float(middle.mean()), float(np.median(us)), spread(us.tolist()))


@dataclass(frozen=True)
class _Table:
    """Profiled inferences by node, under the names of the model.

    Attributes:
        own_us: Microseconds [runs] of the nodes that ran.
        executions: How often each ran in one inference.
        places: Their order; an operator that ran by its parts has the place of the last.
        whole: The nodes of the model that ran as one kernel.
        added: The nodes that are not the model's.
    """

    own_us: Mapping[str, np.ndarray]
    executions: Mapping[str, int]
    places: Mapping[str, int]
    whole: Mapping[str, NodeKernel]
    added: Mapping[str, NodeKernel]

    @staticmethod
    def of(profile: OrtProfile, names: Sequence[str]) -> _Table:
        """Gather the runs; node ``n3`` and its parts are ``names[3]``."""
        own: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(profile.runs)))
        executions: dict[str, int] = {}
        whole, added = {}, {}
        taken = set(names)
        called: dict[str, str] = {}
        last = profile.runs[-1]
        for label in last.own_us:
            match = _LABEL.fullmatch(label)
            if match is None:
                called[label] = label if label not in taken else f"{label} #2"
                added[called[label]] = profile.kernels[label]
            else:
                called[label] = names[int(match[1])]
                if match[0] == f"n{match[1]}":
                    whole[called[label]] = profile.kernels[label]
            executions.setdefault(called[label], last.executions[label])
        for index, run in enumerate(profile.runs):
            for label, us in run.own_us.items():
                own[called[label]][index] += us
        places = {name: place for place, name in enumerate(called.values())}
        return _Table(own, executions, places, whole, added)


def _disturbances(whole: RunTimes, profiled: RunTimes, excess: float) -> Iterator[str]:
    """What makes the times less certain; ``excess``: load and threads over the cores."""
    for samples, what in ((whole, "without"), (profiled, "with")):
        if not samples.stable:
            share = samples.spread_us / samples.median_us
            yield (
                f"the times {what} profiling still drifted after {len(samples.us)} runs (spread {share:.0%}): "
                "close other programs, or measure for longer"
            )
    if excess >= _BUSY:
        yield f"other processes competed for {excess:.1f} cores before the measurement: its times are longer for it"


def _unmatched(profile: OrtProfile) -> Iterator[str]:
    if _parts(profile):
        yield (
            f"ONNX Runtime has no kernel for some operators and ran {', '.join(_parts(profile))} in their place: these "
            "stand as layers without nodes, and the operators with 0 us"
        )
