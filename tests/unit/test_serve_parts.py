"""What serving decides without a model: who runs, which profile, which graph, what is counted."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtopt.engine.profiles import choose
from trtopt.errors import ClosedError, QueueFullError, UsageError
from trtopt.report.schema.manifest import ShapeRange
from trtopt.serve.gpu import WARM_UPS, GraphCache
from trtopt.serve.metrics import BOUNDS_S, Counters, Family, exposition, histogram
from trtopt.serve.pool import Place, Pool, Turn
from trtopt.serve.tensors import (
    GpuTensor,
    InputChecker,
    TensorSpec,
    as_torch,
    check_nan,
    empty_like,
    host_array,
)


def in_queue(pool: Pool, woken: list[Place] | None = None) -> Place:
    """A call that waits and may not be overtaken."""
    place = Place(lambda: None if woken is None else woken.append(place))
    assert pool.request(place) is None
    return place


def test_contexts_are_lent_out_and_the_queue_is_served_in_order() -> None:
    pool, woken = Pool(contexts=2, queue=2), list[Place]()
    assert {pool.request(Place(lambda: None)), pool.request(Place(lambda: None))} == {0, 1}
    first, second = in_queue(pool, woken), in_queue(pool, woken)
    with pytest.raises(QueueFullError, match="2 calls run and 2 wait") as error:
        pool.request(Place(lambda: None))
    assert error.value.exit_code == 4 and error.value.code == "queue-full"
    assert pool.state == (2, 2)
    pool.release(1)
    assert first.context == 1 and second.context is None and woken == [first]
    pool.release(0)
    assert second.context == 0 and woken == [first, second]
    pool.release(0)
    pool.release(1)
    assert pool.state == (0, 0) and pool.is_idle


def test_a_call_that_left_the_queue_gets_nothing_and_keeps_nothing() -> None:
    pool = Pool(contexts=1, queue=2)
    context = pool.acquire(Turn())
    gone, stays = in_queue(pool), in_queue(pool)
    pool.leave(gone)
    assert pool.state == (1, 1)
    pool.release(context)
    assert gone.context is None and stays.context == context
    pool.release(context)
    assert pool.state == (0, 0)


def test_a_free_context_goes_to_who_comes_until_the_first_has_waited_long() -> None:
    pool, woken = Pool(contexts=1, queue=2), list[Place]()
    context = pool.acquire(Turn())
    patient = Place(lambda: woken.append(patient), until=time.monotonic() + 60)
    assert pool.request(patient) is None
    pool.release(context)
    assert patient.context is None and woken == [patient]
    assert pool.request(Place(lambda: None)) == context
    patient.until = 0.0
    pool.release(context)
    assert patient.context == context


@pytest.mark.parametrize("drain", [True, False])
def test_closing_waits_for_what_runs_and_drains_or_refuses_what_waits(drain: bool) -> None:
    pool = Pool(contexts=1, queue=4)
    context = pool.acquire(Turn())
    got: list[object] = []

    def wait() -> None:
        try:
            mine = pool.acquire(Turn())
            got.append("ran")
            pool.release(mine)
        except ClosedError as error:
            got.append(error.code)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    closing = threading.Thread(target=lambda: pool.close(drain=drain))
    for thread in waiting:
        thread.start()
    while pool.state != (1, 3):
        time.sleep(0.001)
    closing.start()
    while not pool._closed:
        time.sleep(0.001)
    with pytest.raises(ClosedError):
        pool.request(Place(lambda: None))
    assert closing.is_alive()
    pool.release(context)
    for thread in (*waiting, closing):
        thread.join(10)
        assert not thread.is_alive()
    assert got == (["ran"] * 3 if drain else ["closed"] * 3)


def test_who_gets_a_context_may_call_the_pool_at_once() -> None:
    pool = Pool(contexts=1, queue=2)
    context = pool.acquire(Turn())
    for _ in range(2):
        place = Place(lambda: None)
        place.wake = partial(lambda mine: pool.release(mine.context), place)
        assert pool.request(place) is None
    thread = threading.Thread(target=pool.release, args=(context,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and pool.state == (0, 0)


def shape_range(low: int, best: int, high: int) -> ShapeRange:
    return ShapeRange((low, 3), (best, 3), (high, 3))


def test_the_nearest_profile_that_takes_the_shapes_is_chosen() -> None:
    profiles = {"x": (shape_range(1, 1, 1), shape_range(1, 8, 64), shape_range(16, 32, 64))}
    chosen = {size: choose(profiles, {"x": (size, 3)}) for size in (1, 2, 8, 16, 17, 32, 64)}
    assert chosen == {1: 0, 2: 1, 8: 1, 16: 1, 17: 2, 32: 2, 64: 2}
    assert choose({}, {}) == 0


def test_a_profile_has_to_take_all_inputs_at_once() -> None:
    profiles = {
        "x": (shape_range(1, 4, 8), shape_range(9, 12, 16)),
        "mask": (shape_range(1, 4, 8), shape_range(9, 12, 16)),
    }
    assert choose(profiles, {"x": (12, 3), "mask": (9, 3)}) == 1
    with pytest.raises(UsageError, match=r"\[1, 3\] to \[8, 3\]; \[9, 3\] to \[16, 3\]"):
        choose(profiles, {"x": (4, 3), "mask": (12, 3)})
    with pytest.raises(UsageError, match=r"shape \[17, 3\] of the input 'mask'"):
        choose(profiles, {"x": (12, 3), "mask": (17, 3)})


def run_of(cache: GraphCache[str], key: str) -> str:
    """What one call does: replay, capture, or run without a graph."""
    graph = cache.get(key)
    if graph is not None:
        return f"replay {graph}"
    if cache.wants(key):
        cache.add(key, key.upper())
        return "capture"
    return "run"


def test_a_shape_is_captured_after_its_warm_up_and_replayed_from_then_on() -> None:
    cache: GraphCache[str] = GraphCache(2, lambda graph: None)
    assert [run_of(cache, "a") for _ in range(5)] == ["run"] * WARM_UPS + ["capture", "replay A", "replay A"]
    assert (cache.counts.captured, cache.counts.replayed) == (1, 2)


def test_graphs_are_bounded_and_the_one_not_used_for_longest_goes() -> None:
    freed: list[str] = []
    cache: GraphCache[str] = GraphCache(2, freed.append)
    for key in ("a", "b"):
        for _ in range(WARM_UPS + 1):
            run_of(cache, key)
    run_of(cache, "a")
    for _ in range(WARM_UPS + 1):
        run_of(cache, "c")
    assert freed == ["B"] and cache.counts.evicted == 1
    assert run_of(cache, "a") == "replay A" and run_of(cache, "b") == "run"
    cache.clear()
    assert sorted(freed) == ["A", "B", "C"]
    assert run_of(cache, "a") == "run"


def test_a_shape_that_cannot_be_captured_is_not_tried_again() -> None:
    cache: GraphCache[str] = GraphCache(2, lambda graph: None)
    for _ in range(WARM_UPS):
        assert not cache.wants("a")
    assert cache.wants("a")
    cache.fail("a")
    cache.clear()
    assert not any(cache.wants("a") for _ in range(10))
    assert cache.counts.failed == 1


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    cache: GraphCache[str] = GraphCache(2, lambda graph: None)
    assert not any(cache.wants(f"{index}") for index in range(1000))
    assert len(cache._runs) <= 16
    assert not any(GraphCache[str](0, lambda graph: None).wants("a") for _ in range(10))


def test_latencies_fall_into_their_buckets() -> None:
    counters = Counters()
    for seconds in (1e-6, 1e-5, 1.1e-5, 0.5, 100.0):
        counters.replied(seconds)
    latency = counters.latency
    assert latency.count == 5 and latency.sum_s == pytest.approx(100.500022)
    assert len(latency.cumulative) == len(BOUNDS_S) + 1
    by_bound = dict(zip(latency.bounds_s, latency.cumulative, strict=False))
    assert by_bound[1e-5] == 2 and by_bound[2e-5] == 3 and latency.cumulative[-2:] == (4, 5)


def test_the_text_is_what_prometheus_reads() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
    counters = Counters()
    counters.replied(3e-5)
    odd = 'mo"del\\ \n.onnx'
    errors = Family("e", "counter", "E", [("_total", {"kind": "usage"}, 2)])
    text = exposition({odd: [histogram(counters.latency), errors]})
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    found = {
        (sample.name, sample.labels.get("le")): sample.value for sample in families["trtopt_latency_seconds"].samples
    }
    assert families["trtopt_latency_seconds"].type == "histogram"
    assert found["trtopt_latency_seconds_bucket", "2e-05"] == 0 and found["trtopt_latency_seconds_bucket", "4e-05"] == 1
    assert found["trtopt_latency_seconds_bucket", "+Inf"] == found["trtopt_latency_seconds_count", None] == 1
    assert families["e"].samples[0].labels == {"model": odd, "kind": "usage"}


def test_a_text_has_each_metric_once_whatever_the_engines_are() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
    counters = Counters()
    counters.replied(3e-5)
    text = exposition({name: [histogram(counters.latency)] for name in ("a", "b")})
    assert text.count("# TYPE") == 1 and text.count("# HELP") == 1
    (family,) = parser.text_string_to_metric_families(text)
    counts = [(item.labels["model"], item.value) for item in family.samples if item.name.endswith("_count")]
    assert counts == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16])
def test_nan_is_found_in_every_floating_type(dtype: Any) -> None:
    with pytest.raises(UsageError, match="'x' has 1 NaN"):
        check_nan({"x": np.array([1, np.nan]).astype(dtype)}, outputs=False)
    check_nan({"x": np.zeros(2, ml_dtypes.int4), "y": np.array([1, 2])}, outputs=False)


class Elsewhere:
    """A tensor on another GPU than the engine's: nothing of it may be read."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 1  # CUDA

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("read")


@pytest.mark.parametrize(("takes_gpu", "message"), [(True, "GPU 1, and the engine on GPU 0"), (False, "lies on a GPU")])
def test_tensors_on_another_gpu_are_refused_unread(takes_gpu: bool, message: str) -> None:
    border = InputChecker([TensorSpec("x", np.dtype(np.float32), ("N",))], takes_gpu=takes_gpu)
    with pytest.raises(UsageError, match=message):
        border.check({"x": Elsewhere()})


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "uint8", "bool", "bfloat16", "float8_e5m2"])
def test_tensors_are_found_by_their_address(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    like = torch.zeros(1)
    found = empty_like(like, (2, 3, 4), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    assert found.pointer == found.tensor.data_ptr() and found.shape == (2, 3, 4) and found.is_contiguous
    assert found.tensor.dtype == getattr(torch, dtype) and found.nbytes == 24 * found.dtype.itemsize
    np.testing.assert_array_equal(host_array(found.tensor).shape, found.shape)


def test_channels_last_is_another_look_at_the_same_memory() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.zeros(2, 3, 5, 5).to(memory_format=torch.channels_last)
    found = GpuTensor(tensor, np.dtype(np.float32))
    assert found.shape == (2, 3, 5, 5) and not found.is_contiguous
    last = found.channels_last()
    assert last.shape == (2, 5, 5, 3) and last.is_contiguous and last.pointer == found.pointer


def test_torch_tensors_share_their_memory_in_bf16_too() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.bfloat16)
    array = host_array(tensor)
    assert array.dtype == ml_dtypes.bfloat16 and array.ctypes.data == tensor.data_ptr()
    back = as_torch(array.copy())
    assert back.dtype == torch.bfloat16 and torch.equal(back, tensor)
    np.testing.assert_array_equal(host_array(tensor.T), array.T)
    for refused in (tensor.clone().requires_grad_(), torch.ones(1, dtype=torch.complex64).conj().imag):
        with pytest.raises((BufferError, RuntimeError)):
            host_array(refused)


def test_the_memory_of_a_tensor_lives_as_long_as_its_array() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    arrays = [host_array(torch.full((1000,), float(index), dtype=torch.bfloat16)) for index in range(50)]
    assert all(np.all(array == index) for index, array in enumerate(arrays))
