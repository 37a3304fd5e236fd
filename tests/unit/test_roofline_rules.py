"""The rules together: their pages, the order of findings, and that a layer counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from advice import Net, subject_of

from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.roofline import gap
from trtopt.roofline.layer import predict
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.rules import precision, registry, sizes, structure
from trtopt.roofline.rules.registry import HEADINGS, NO_GAIN_US, PAGES, RULES, advise
from trtopt.roofline.rules.subject import Subject
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"


@pytest.mark.parametrize("name", PAGES)
def test_every_page_has_a_summary_and_its_headings_in_order(name: str) -> None:
    lines = PAGES[name].splitlines()
    assert lines[0].endswith(".") and lines[1] == ""
    assert [line for line in lines if line in {f"{heading}:" for heading in HEADINGS}] == [f"{h}:" for h in HEADINGS]
    for heading in HEADINGS:
        assert lines[lines.index(f"{heading}:") + 1].startswith("    ")
    assert max(len(line) for line in lines) <= 100


def test_every_rule_has_a_page_and_so_has_the_comparison_of_levels() -> None:
    assert set(PAGES) == {*RULES, gap.RULE}


def test_every_rule_is_tried_by_the_tests_of_its_family() -> None:
    """A rule without a network it fires on would pass unseen."""
    texts = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_roofline_rules_*.py"))
    assert [name for name in RULES if f'"{name}"' not in texts] == []


def network() -> Net:
    """Something for many rules: three image channels, odd sizes, pooling, depthwise, a vocabulary."""
    net = Net()
    x = net.op("Relu", net.conv(net.input("x", 3, 3, 224, 224), 3, 61, kernel=7, stride=2))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for _ in range(3):
        wide = net.op("Relu", net.conv(x, 61, 300, kernel=1))
        x = net.conv(net.op("Relu", net.conv(wide, 300, 300, group=300)), 300, 61, kernel=1)
    tokens = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.output(net.linear(tokens, 61, 33708))


@pytest.mark.parametrize("base", ["fp32", "fp16"])
def test_findings_come_by_gain_and_those_without_are_hints_or_information(base: str) -> None:
    found = advise(subject_of(network(), "L4", base, batch=3))  # type: ignore[arg-type]
    assert len(found) > 2
    gains = [item.gain_us for item in found]
    assert gains == sorted(gains, reverse=True)
    for item in found:
        assert item.message and item.remedy
        assert item.gain_us == 0.0 or item.gain_us >= NO_GAIN_US
        assert item.severity in (("warning", "hint", "info") if item.gain_us else ("hint", "info"))


def test_no_finding_promises_more_than_its_layers_take() -> None:
    for base in ("fp32", "fp16"):
        subject = subject_of(network(), "L4", base, batch=3)  # type: ignore[arg-type]
        for item in advise(subject):
            concerned = {subject.layer_of[name].name for name in item.nodes} or set(subject.row)
            assert item.gain_us <= sum(subject.row[name].predicted_us for name in concerned)


def test_a_layer_is_in_one_finding_of_a_rule() -> None:
    """Within a rule the gains add up: no layer wins twice (two narrower types are alternatives)."""
    subject = subject_of(network(), "L4", batch=3)
    for name, rule in RULES.items():
        layers = [layer for item in rule(subject) for layer in item.gains]
        if name != "precision-too-wide":
            assert len(layers) == len(set(layers)), name


def test_a_network_that_is_as_it_should_be_gets_no_warning() -> None:
    net = Net()
    x = net.input("x", 4096, 4096)
    for _ in range(4):
        x = net.op("Relu", net.linear(x, 4096, 4096))
    assert [item for item in advise(subject_of(net.output(x))) if item.severity == "warning"] == []


def test_advice_on_a_network_without_layers_is_none() -> None:
    net = Net()
    assert advise(subject_of(net.output(net.op("Identity", net.input("x", 4))), batch=4)) == ()


def test_the_work_of_the_rules_grows_with_the_network_and_not_faster() -> None:
    """Counts predictions, not seconds: each distinct layer is predicted a bounded number of times."""

    def predictions(count: int) -> int:
        net = Net()
        x = net.input("x", 8, 61, 32, 32)
        for _ in range(count):
            x = net.op("Relu", net.conv(x, 61, 61))
        subject = subject_of(net.output(x), batch=8)
        advise(subject)
        return len(subject._times)

    assert predictions(40) <= predictions(20) + 10


@pytest.mark.shared
@pytest.mark.skipif(not MODELS.is_dir(), reason="needs the models folder beside the checkout")
@pytest.mark.parametrize("base", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["fastestdet_coco", "resnet20_cifar10", "crepe_tiny", "dscnn_kws", "mnist_cntk"])
def test_real_models_get_a_handful_of_findings(name: str, base: str) -> None:
    loaded = load(MODELS / name / "model.onnx")
    given = {item.name: tuple(d if isinstance(d, int) else 8 for d in item.shape) for item in loaded.inputs}
    shapes = static_shapes(loaded.model, given)
    model = infer_shapes(loaded.model)
    layers = layers_of_graph(model, shapes, GraphTypes(Precision(base)))
    gpu = find_gpu("L4")
    rows, _ = predict(layers, gpu)
    found = advise(Subject(model, shapes, tuple(layers), rows, gpu, 8))
    assert 1 <= len(found) <= 10
    nodes = {str(node.name) for node in model.graph}
    assert all(set(item.nodes) <= nodes for item in found)


def test_what_is_found_ends_in_a_line_to_type_or_in_what_it_needs() -> None:
    for rule, act in registry.ACTS.items():
        assert rule in registry.RULES.values()
        assert act[0] in ("build", "analyze") or act[0].startswith("needs "), rule
    spoken = {sizes.first_layer, structure.io_layout, precision.precision_too_wide}
    assert set(registry.RULES.values()) - registry.ACTS.keys() == spoken
