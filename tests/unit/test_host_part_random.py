"""Random graphs with refused nodes at random places, cut in two and run."""

from __future__ import annotations

import detectors
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from drawn_cases import few_or
from test_host_part import both

from trtopt.accuracy.compare import HostPart
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import infer_shapes
from trtopt.pipeline.host import Cut
from trtopt.rewrite.host_part import NoTailError, split
from trtopt.support.ort_session import OrtSession


def random_graph(seed: int) -> onnx.ModelProto:
    """Values [N, 6] through arithmetic, moves and shape arithmetic; Neg stands for what is refused."""
    rng = np.random.default_rng(seed)
    lines, values = ["w = Add(x, c)"], ["x", "z", "w"]
    for number in range(int(rng.integers(3, 25))):
        first, second = (str(rng.choice(values)) for _ in range(2))
        name = f"v{number}"
        kind = rng.integers(0, 8)
        if kind == 0:
            lines.append(f"{name}a, {name}b = Split <axis = 1, num_outputs = 2> ({first})")
            lines.append(f"{name} = Concat <axis = 1> ({name}b, {name}a)")
        elif kind == 1:
            lines.append(f"{name}s = Shape({first}) {name}r = Reshape({second}, {name}s) {name} = Identity({name}r)")
        elif kind == 2:
            lines.append(f"{name}t = Transpose <perm = [1, 0]> ({first}) {name} = Transpose <perm = [1, 0]> ({name}t)")
        elif kind == 3:
            lines.append(f"{name} = Gather <axis = 1> ({first}, places)")
        elif kind == 4 and number > 2:
            lines.append(f"{name} = Neg({first})")
        else:
            lines.append(f"{name} = Add({first}, {second})" if kind % 2 else f"{name} = Relu({first})")
        values.append(name)
    made = [value for value in values if value.startswith("v")]
    chosen = sorted({str(rng.choice(made)) for _ in range(3)} | {made[-1]})
    outputs = ", ".join(f"float[N, 6] {name}" for name in chosen)
    more = {"c": rng.standard_normal((1, 6)).astype(np.float32), "places": rng.permutation(6)}
    text = f"{detectors.HEADER} g (float[N, 6] x, float[N, 6] z) => ({outputs}) {{ {' '.join(lines)} }}"
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in more.items())
    for number, node in enumerate(proto.graph.node):
        node.name = f"node{number}"
    return proto


@pytest.mark.parametrize("graphs", few_or(200))
def test_random_graphs_give_the_same_in_two_parts(graphs: int) -> None:
    """Those where nothing can be cut, or nothing has to be, count apart."""
    rng, was_cut = np.random.default_rng(0), 0
    for seed in range(graphs):
        proto = random_graph(seed)
        model = infer_shapes(ir.from_proto(proto))
        refused = {node for node in model.graph if node.op_type == "Neg"}
        try:
            parts = split(model, refused, {})
        except NoTailError:
            continue
        if parts is None:
            continue
        was_cut += 1
        assert all(node.op_type != "Neg" for node in parts.engine.graph), seed
        feeds = {name: rng.standard_normal((3, 6)).astype(np.float32) for name in "xz"}
        names = tuple(value.name or "" for value in model.graph.outputs)
        found = Cut(ModelArtifact(parts.engine, None, ""), HostPart(parts.host, parts.between, names))
        whole = OrtSession(model)
        together = both(found, feeds)
        for name, value in zip(whole.output_names, whole.run(feeds), strict=True):
            assert np.array_equal(together[name], value), (seed, name)
    assert was_cut > 0.3 * graphs
