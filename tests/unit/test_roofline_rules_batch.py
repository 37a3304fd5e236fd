"""How much work there is at once: each rule fires, and not on the near miss."""

from __future__ import annotations

import dataclasses

import pytest
from advice import Net, findings, subject_of

from trtopt.report.text.format import time_text
from trtopt.roofline.layer import layer_time
from trtopt.roofline.rules.change import at_batch
from trtopt.roofline.rules.registry import advise


def layers(batch: int, width: int = 1024, count: int = 4) -> Net:
    """``count`` products [batch, width] x [width, width]."""
    net = Net()
    x = net.input("x", batch, width)
    for _ in range(count):
        x = net.op("Relu", net.linear(x, width, width))
    return net.output(x)


def test_a_batch_of_one_is_told_the_batch_that_fills_the_gpu() -> None:
    (found,) = findings("batch-too-small", layers(1), batch=1)
    assert (found.severity, found.gain_us) == ("hint", 0.0)
    batch = int(found.remedy.split("up to ")[1].split(" ")[0])
    assert batch >= 16
    larger = subject_of(layers(batch)).total_us
    assert f"{time_text(larger)} the batch" in found.message
    assert subject_of(layers(1)).total_us > 1.5 * larger / batch


def test_a_large_batch_and_a_network_without_one_are_no_finding() -> None:
    assert not findings("batch-too-small", layers(512), batch=512)
    assert not findings("batch-too-small", layers(1), batch=None)


def test_the_work_at_another_batch_is_that_of_the_network_at_that_batch() -> None:
    def network(batch: int) -> Net:
        net = Net()
        x = net.op("Relu", net.conv(net.input("x", batch, 8, 32, 32), 8, 64, stride=2))
        x = net.conv(x, 64, 64, group=64)
        tokens = net.op("Reshape", x, net.ints(batch, 64, 256))
        scores = net.op("Softmax", net.op("MatMul", tokens, net.op("Transpose", tokens, perm=[0, 2, 1])), axis=-1)
        return net.output(net.linear(net.op("MatMul", scores, tokens), 256, 256))

    for base in ("fp32", "fp16"):
        small, large = subject_of(network(2), base=base), subject_of(network(6), base=base)
        for before, after in zip(small.layers, large.layers, strict=True):
            if before.work is not None and before.work.flop:
                touched = after.work.inference_bytes  # by all kernels together
                assert dataclasses.replace(at_batch(before.work, 6, 2), inference_bytes=touched) == after.work


def test_an_odd_batch_is_a_hint_at_least_and_a_multiple_of_eight_is_not() -> None:
    (found,) = findings("batch-size", layers(203), batch=203)
    proposed = int(found.remedy.removeprefix("run batches of "))
    assert proposed % 8 == 0 and proposed < 2 * 203
    assert not findings("batch-size", layers(4, count=1), batch=None)


def test_a_larger_batch_that_takes_no_longer_is_a_gain_for_the_same_samples() -> None:
    net = layers(12, width=256)
    (found,) = findings("batch-size", net, batch=12)
    assert found.remedy == "run batches of 16"
    now, larger = subject_of(net).total_us, subject_of(layers(16, width=256)).total_us
    assert found.gain_us == pytest.approx(now - larger * 12 / 16)
    assert found.severity == "warning"


def test_a_batch_of_millions_is_judged_at_once() -> None:
    """One that looks at every batch between does not end."""
    findings("batch-size", layers(1 << 30, width=64, count=1), batch=1 << 30)


def recurrent(hidden: int, rows: int, op: str = "LSTM") -> Net:
    """A recurrent layer over 50 steps of 256 features."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    net = Net()
    x = net.input("x", 50, rows, 256)
    weights = net.weight(1, gates * hidden, 256), net.weight(1, gates * hidden, hidden)
    return net.output(net.op(op, x, *weights, hidden_size=hidden, name="layer"))


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_a_hidden_size_that_is_no_multiple_of_32_is_found(op: str) -> None:
    (found,) = findings("recurrent-size", recurrent(500, 64, op))
    assert found.nodes == ("layer",)
    assert "hidden size 500" in found.message and found.remedy == "hidden size 512, minibatch 64"


def test_a_minibatch_above_32_is_a_multiple_of_it() -> None:
    (found,) = findings("recurrent-size", recurrent(512, 50))
    assert found.remedy == "hidden size 512, minibatch 64"


def test_few_sequences_are_told_what_32_would_cost_each() -> None:
    (found,) = findings("recurrent-size", recurrent(512, 1))
    assert (found.severity, found.gain_us) == ("hint", 0.0)
    subject, full = subject_of(recurrent(512, 1)), subject_of(recurrent(512, 32))
    now = subject.row["layer"].predicted_us
    work = full.layers[-1].work
    if work is None:
        raise AssertionError
    each = layer_time(work, full.gpu).predicted_us / 32
    assert f"{time_text(now)} each; with 32 {time_text(each)} each" in found.message


def test_multiples_of_32_are_no_finding() -> None:
    assert not findings("recurrent-size", recurrent(512, 64))


def test_nothing_is_said_about_the_whole_when_much_of_it_has_no_cost() -> None:
    subject = subject_of(layers(1, width=64, count=20), batch=1)
    whole = {"launch-bound", "batch-too-small", "precision-cannot-help"}
    assert whole <= {item.rule for item in advise(subject)}
    unknown = [dataclasses.replace(layer, work=None) for layer in subject.layers[:5]]
    partial = dataclasses.replace(subject, layers=(*unknown, *subject.layers[5:]), rows=subject.rows[5:])
    assert not whole & {item.rule for item in advise(partial)}


def test_a_network_of_tiny_kernels_is_bound_by_launches_and_one_of_large_ones_is_not() -> None:
    small = layers(1, width=64, count=20)
    (found,) = findings("launch-bound", small)
    rows = subject_of(small).rows
    share = sum(row.latency_us for row in rows) / sum(row.predicted_us for row in rows)
    assert found.message.startswith(f"{100 * share:.0f} % of the time")
    assert (found.severity, found.gain_us) == ("hint", 0.0)
    assert not findings("launch-bound", layers(16384, width=2048, count=1))


def test_launches_are_those_of_every_step_and_of_the_compilers_kernels() -> None:
    (found,) = findings("launch-bound", recurrent(64, 1))
    steps = sum(layer.work.steps for layer in subject_of(recurrent(64, 1)).layers if layer.work is not None)
    assert steps > 1
    assert f"the launch of {steps} kernels, the steps of" in found.message
    graph, engine = subject_of(layers(1, width=64, count=20)), subject_of(layers(1, width=64, count=5))
    (found,) = (item for item in advise(graph, engine) if item.rule == "launch-bound")
    assert f"the launch of {len(engine.rows)} kernels" in found.message
