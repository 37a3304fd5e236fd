"""An engine inside an ONNX model: the form in which ONNX Runtime loads engines (``EPContext``).

The node's attributes are those that the execution providers of ONNX Runtime read (``onnx_ctx_model_helper.cc`` of its
providers ``nv_tensorrt_rtx`` and ``tensorrt``); a node of ``source`` is taken by the provider of that name alone. The
part of a model that the host runs becomes ordinary nodes behind it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.errors import InvalidModelError
from trtopt.report.schema.manifest import EngineTensor, Manifest

PROVIDERS = {TENSORRT_RTX.name: "NvTensorRTRTXExecutionProvider", TENSORRT.name: "TensorrtExecutionProvider"}
"""The execution provider of ONNX Runtime that loads a backend's engines, which is the ``source`` of the node."""

_OP, _DOMAIN = "EPContext", "com.microsoft"
_IR_VERSION, _OPSET = 8, 17
"""Of a model that is the node alone."""

_HEADER_BYTES = 64
"""Of an engine, what ONNX Runtime asks TensorRT for RTX whether it can be loaded by."""

LARGEST_EMBEDDED_BYTES = (1 << 31) - (1 << 20)
"""One protobuf can have 2 GiB; the rest of the model has to fit too."""


def context_model(
    engine: bytes, manifest: Manifest, host: onnx.ModelProto | None = None, *, file: str | None = None
) -> bytes:
    """An ONNX model of an engine, with the part for the host behind it.

    Args:
        engine: The engine.
        manifest: What it is.
        host: The part for the host, where the model has one. Weights in files of their own stay there.
        file: The engine's file, which lies beside the model (``embed_mode`` 0); None to embed the engine.

    Returns:
        The content of the ``.onnx`` file; the same arguments give the same bytes.

    Raises:
        InvalidModelError: An engine is too large to be embedded.

    Example:
        >>> content = context_model(engine.data, engine.manifest, file="model.rtx.engine")
    """
    if file is None and len(engine) > LARGEST_EMBEDDED_BYTES:
        raise InvalidModelError(
            f"An engine of {len(engine)} bytes does not fit one ONNX file, which can have 2 GiB",
            where="--epcontext-embed",
            remedy="leave it out: the model then names the engine's file",
        )
    inputs, outputs = map(_value_info, manifest.inputs), map(_value_info, manifest.outputs)
    given, made = {item.name: item for item in inputs}, {item.name: item for item in outputs}
    host_graph = onnx.GraphProto() if host is None else host.graph
    given.update((item.name, item) for item in host_graph.input if item.name not in made and item.name not in given)
    every = {**made, **{item.name: item for item in host_graph.output}}
    names = () if manifest.host is None else manifest.host.model_outputs
    final = [every[name] for name in names or every]
    graph = helper.make_graph(
        [_node(engine, manifest, file), *host_graph.node],
        "trtopt",
        list(given.values()),
        final,
        initializer=host_graph.initializer,
        sparse_initializer=host_graph.sparse_initializer,
        value_info=[item for item in (*made.values(), *host_graph.value_info) if item.name not in (names or every)],
    )
    opsets = [helper.make_opsetid("", _OPSET)] if host is None else list(host.opset_import)
    if all(item.domain != _DOMAIN for item in opsets):
        opsets.append(helper.make_opsetid(_DOMAIN, 1))
    version = _IR_VERSION if host is None else host.ir_version
    model = helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="trtopt")
    model.functions.extend(() if host is None else host.functions)
    if manifest.backend == TENSORRT_RTX.name:  # ONNX Runtime asks the provider before it loads the engine
        source = PROVIDERS[manifest.backend]
        helper.set_model_props(model, {f"ep_compatibility_info.{source}": engine[:_HEADER_BYTES].hex()})
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def engine_in(content: bytes) -> bytes | str:
    """The engine that a model embeds, or the name of the file that it names.

    Raises:
        ValueError: It is no model with one engine, or the file lies in another folder than the model.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except (DecodeError, RecursionError) as error:
        raise ValueError("it is no ONNX model") from error
    nodes = [node for node in model.graph.node if (node.domain, node.op_type) == (_DOMAIN, _OP)]
    if len(nodes) != 1:
        raise ValueError(f"it has {len(nodes)} nodes {_OP}")
    attributes = {item.name: item for item in nodes[0].attribute}
    if "ep_cache_context" not in attributes:
        raise ValueError(f"its node {_OP} has no engine")
    content, mode = attributes["ep_cache_context"].s, attributes.get("embed_mode")
    if mode is None or mode.i:
        return content
    return content.decode()


def hardware_of(manifest: Manifest) -> str:
    """``hardware_architecture`` as ONNX Runtime has it: ``89`` for compute capability 8.9, ``80+`` from Ampere on."""
    if manifest.hardware_compatibility == "ampere+" or len(manifest.compute_capabilities) != 1:
        return "80+"
    return manifest.compute_capabilities[0].replace(".", "")


def _node(engine: bytes, manifest: Manifest, file: str | None) -> onnx.NodeProto:
    name = f"trtopt_{manifest.engine_sha256[:16]}"
    return helper.make_node(
        _OP,
        [item.name for item in manifest.inputs],
        [item.name for item in manifest.outputs],
        name=name,
        domain=_DOMAIN,
        main_context=1,
        embed_mode=int(file is None),
        ep_cache_context=engine if file is None else file.encode(),
        ep_sdk_version=manifest.backend_version,
        hardware_architecture=hardware_of(manifest),
        partition_name=name,
        source=PROVIDERS[manifest.backend],
    )


def _value_info(item: EngineTensor) -> onnx.ValueInfoProto:
    dtype = ir.DataType.from_numpy(np.dtype(getattr(ml_dtypes, item.dtype, item.dtype)))
    shape = None if item.shape is None else [None if dim == "?" else dim for dim in item.shape]
    return helper.make_tensor_value_info(item.name, int(dtype), shape)
