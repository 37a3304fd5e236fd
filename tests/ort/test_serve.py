"""One engine called by many: replies equal to the serial ones, wrong calls refused, nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from engine_files import file_hash, manifest, rtx_engine, save

import trtopt
from trtopt.engine.manifest import verify
from trtopt.errors import (
    ClosedError,
    IntegrityError,
    InvalidModelError,
    MissingDependencyError,
    QueueFullError,
    TargetError,
    UsageError,
)
from trtopt.hardware.probe import probe
from trtopt.report.schema.manifest import EngineTensor, ShapeRange
from trtopt.serve.pool import Pool, Turn
from trtopt.support.ort_session import _LIMIT

NET = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[N, K] x, float[N, K] mask) => (float[N, K] y, float[N] best)
<int64[1] last = {-1}>
{
    t = Tanh(x)
    y = Mul(t, mask)
    best = ReduceMax <keepdims = 0> (y, last)
}
"""
BF16 = """
<ir_version: 10, opset_import: ["" : 21]>
net (bfloat16[N] x) => (bfloat16[N] y) { y = Mul(x, x) }
"""
"""ONNX Runtime has no Mul in BF16."""


def saved(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return saved(tmp_path / "net.onnx", NET)


def feeds(seed: int) -> dict[str, np.ndarray]:
    """Inputs of a random shape."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 40, 2))
    return {"x": rng.standard_normal(shape).astype(np.float32), "mask": rng.random(shape).astype(np.float32)}


def equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_replies_are_those_of_onnx_runtime_and_the_engine_says_so(net: Path) -> None:
    with trtopt.Engine.load(net) as engine:
        given = feeds(0)
        found = engine.run(given)
        np.testing.assert_allclose(found["y"], np.tanh(given["x"]) * given["mask"], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found["best"], found["y"].max(1))
        assert engine.runtime.startswith("onnxruntime ") and engine.runtime.endswith(" on the CPU")
        assert engine.fallback_reason == ""
        assert repr(engine).startswith(f"<trtopt.Engine {engine.name}: {engine.inputs[0].name}")
        assert [(spec.name, spec.dtype, spec.shape) for spec in engine.inputs] == [
            ("x", np.float32, ("N", "K")),
            ("mask", np.float32, ("N", "K")),
        ]
        assert [spec.name for spec in engine.outputs] == ["y", "best"]


def test_32_threads_get_what_one_would(net: Path) -> None:
    with trtopt.Engine.load(net, contexts=3, queue=32) as engine:
        calls = [feeds(seed) for seed in range(640)]
        serial = [engine.run(call) for call in calls]
        with ThreadPoolExecutor(32) as threads:
            assert all(equal(a, b) for a, b in zip(threads.map(engine.run, calls), serial, strict=True))
        assert engine.latency.count == 1280


def test_200_tasks_get_what_one_would_beside_threads(net: Path) -> None:
    with trtopt.Engine.load(net, contexts=3, queue=300) as engine:
        calls = [feeds(seed) for seed in range(200)]
        serial = [engine.run(call) for call in calls]

        async def main() -> list[dict[str, np.ndarray]]:
            return await asyncio.gather(*(engine.run_async(call) for call in calls))

        with ThreadPoolExecutor(8) as threads:
            beside = threads.map(engine.run, calls)
            replies = asyncio.run(main())
            assert all(equal(a, b) for a, b in zip(beside, serial, strict=True))
        assert all(equal(a, b) for a, b in zip(replies, serial, strict=True))
        again = asyncio.run(main())  # another event loop
        assert all(equal(a, b) for a, b in zip(again, serial, strict=True))
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("trtopt ")]
        assert len(names) <= 3, names


def test_a_thread_goes_on_with_the_call_that_its_context_went_to(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trtopt.Engine.load(net, contexts=1, queue=100) as engine:
        calls = [feeds(seed) for seed in range(100)]
        serial = [engine.run(call) for call in calls]
        submit, started = engine._executor.submit, list[Any]()
        monkeypatch.setattr(engine._executor, "submit", lambda *call: started.append(call) or submit(*call))

        async def main() -> list[dict[str, np.ndarray]]:
            tasks = [asyncio.create_task(engine.run_async(call)) for call in calls]
            context = engine._pool.acquire(Turn())
            await asyncio.sleep(0)
            engine._pool.release(context)
            return await asyncio.gather(*tasks)

        assert all(equal(a, b) for a, b in zip(asyncio.run(main()), serial, strict=True))
        assert len(started) == 1 and engine._pool.is_idle


def test_a_reply_for_an_event_loop_that_ended_is_dropped(net: Path) -> None:
    with trtopt.Engine.load(net, contexts=1) as engine:
        context = engine._pool.acquire(Turn())
        loop = asyncio.new_event_loop()
        task = loop.create_task(engine.run_async(feeds(0)))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        engine._pool.release(context)
        while not engine._pool.is_idle:
            time.sleep(1e-3)
        assert not task.done() and engine.run(feeds(0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_full_queue_refuses_at_once_and_a_cancelled_call_leaves_it(net: Path) -> None:
    with trtopt.Engine.load(net, contexts=1, queue=2) as engine:
        given = feeds(0)
        expected = engine.run(given)

        async def main() -> None:
            context = engine._pool.acquire(Turn())  # a call that runs
            waiting = [asyncio.create_task(engine.run_async(given)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await engine.run_async(given)
            with pytest.raises(QueueFullError):
                engine.run(given)
            assert "trtopt_queue_length" in engine.metrics() and engine._pool.state == (1, 2)
            waiting[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            assert engine._pool.state == (1, 1)
            engine._pool.release(context)
            assert equal(await waiting[1], expected)

        asyncio.run(main())
        assert engine._pool.is_idle and equal(engine.run(given), expected)
        text = engine.metrics()
        assert 'trtopt_errors_total{kind="queue-full",model="net.onnx"} 2.0' in text
        assert 'trtopt_errors_total{kind="cancelled",model="net.onnx"} 1.0' in text
        assert 'trtopt_latency_seconds_count{model="net.onnx"} 3.0' in text


def waiter(pool: Pool, order: list[str], name: str) -> threading.Thread:
    """A thread that waits in the queue, and notes when it has its context."""

    def wait() -> None:
        turn = Turn()
        pool.acquire(turn)
        order.append(name)
        pool.end(turn)

    thread = threading.Thread(target=wait)
    before = pool.state[1]
    thread.start()
    while pool.state[1] == before:
        time.sleep(1e-3)
    return thread


def test_who_has_waited_is_served_in_order_and_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtopt.serve.pool, "OVERTAKEN_S", 0.0)
    pool, order = Pool(1, 8), list[str]()
    running, late = Turn(), Turn()
    pool.acquire(running)
    threads = [waiter(pool, order, name) for name in "abc"]
    pool.end(running)
    pool.acquire(late)
    assert order == ["a", "b", "c"]
    pool.end(late)
    for thread in threads:
        thread.join()
    assert pool.is_idle


def test_a_free_context_does_not_wait_for_a_thread_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtopt.serve.pool, "OVERTAKEN_S", 60.0)
    pool, order = Pool(1, 8), list[str]()
    running, late = Turn(), Turn()
    pool.acquire(running)
    threads = [waiter(pool, order, name) for name in "abc"]
    with pool._lock:  # the one that is woken cannot take the context yet
        pool._free.append(0)
        running.context = None
        assert pool._has_context()
        pool._offer(running)
        late.context = pool._free.pop()
    pool.end(running)
    assert order == []
    pool.end(late)
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c"] and pool.is_idle


def test_cancelling_at_any_moment_loses_no_context(net: Path) -> None:
    with trtopt.Engine.load(net, contexts=2, queue=1000) as engine:
        given = feeds(0)

        async def main() -> None:
            rng = np.random.default_rng(0)
            for _ in range(20):
                tasks = [asyncio.create_task(engine.run_async(given)) for _ in range(20)]
                await asyncio.sleep(float(rng.random()) * 2e-3)
                for index in rng.permutation(20)[:15]:
                    tasks[index].cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(item, (dict, asyncio.CancelledError)) for item in done)

        asyncio.run(main())
        engine.close()  # would wait for ever for a context that was lost
        assert engine._pool.state == (0, 0)


WRONG: dict[str, tuple[Any, str]] = {
    "a misspelt name": ({"x": np.ones((2, 3), np.float32), "masc": np.ones((2, 3), np.float32)}, "did you mean 'mask'"),
    "one too many": (
        {"x": np.ones((2, 3), np.float32), "mask": np.ones((2, 3), np.float32), "zzz": np.ones(1)},
        "There is no input 'zzz'",
    ),
    "a missing one": ({"x": np.ones((2, 3), np.float32)}, "lacks the input mask"),
    "none": ({}, "lacks the input x, mask"),
    "a list": ([np.ones((2, 3), np.float32)], "a list, not a dict"),
    "another type": ({"x": np.ones((2, 3)), "mask": np.ones((2, 3), np.float32)}, "'x' is float64; .* float32"),
    "other bytes": ({"x": np.ones((2, 3), ">f4"), "mask": np.ones((2, 3), np.float32)}, "takes float32"),
    "another rank": ({"x": np.ones(3, np.float32), "mask": np.ones((2, 3), np.float32)}, r"\[3\]; .* \[N, K\]"),
    "sizes that differ": (
        {"x": np.ones((2, 3), np.float32), "mask": np.ones((2, 4), np.float32)},
        "'K' is 3 in 'x' and 4 in 'mask'",
    ),
    "no array": ({"x": [[1.0]], "mask": np.ones((1, 1), np.float32)}, "is a list, no array"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_refused_by_name(what: str, net: Path) -> None:
    given, message = WRONG[what]
    with trtopt.Engine.load(net) as engine:
        for call in (engine.run, lambda inputs: asyncio.run(engine.run_async(inputs))):
            with pytest.raises(UsageError, match=message) as error:
                call(given)
            assert error.value.where and error.value.remedy
        assert 'kind="usage",model="net.onnx"} 2' in engine.metrics() and engine._pool.is_idle


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_a_signal_handler_that_raises_at_any_moment_loses_no_context(net: Path) -> None:
    class Raised(BaseException):
        pass

    armed = False

    def handler(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Raised

    def run_until_raised(engine: trtopt.Engine) -> None:
        """CPython drops what is raised while it collects garbage; and 3.13 does not catch it in a loop's condition."""
        while armed:
            engine.run(feeds(0))

    rng, raised = np.random.default_rng(0), 0
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with trtopt.Engine.load(net, contexts=2, queue=4) as engine:
            for _ in range(1000):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 6e-4))
                    run_until_raised(engine)
                except Raised:
                    raised += 1
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert engine._pool.state == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised > 900


def test_a_model_that_fails_gives_its_context_back(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "m.onnx",
        """
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N] x, int64[M] shape) => (float[A, B] y) { y = Reshape(x, shape) }
        """,
    )
    with trtopt.Engine.load(path, contexts=1) as engine:
        for _ in range(3):
            with pytest.raises(InvalidModelError, match="fails on an input"):
                engine.run({"x": np.ones(6, np.float32), "shape": np.array([4, 4])})
        found = engine.run({"x": np.ones(6, np.float32), "shape": np.array([2, 3])})
        assert found["y"].shape == (2, 3)


def test_nan_passes_unless_it_is_refused(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> net (float[N] x) => (float[N] y) { y = Log(x) }'
    path = saved(tmp_path / "log.onnx", text)
    with trtopt.Engine.load(path) as engine:
        assert np.isnan(engine.run({"x": np.array([-1, np.nan], np.float32)})["y"]).all()
    with trtopt.Engine.load(path, nan="refuse") as engine:
        assert engine.run({"x": np.array([0.0, 1.0], np.float32)})["y"][0] == -np.inf
        with pytest.raises(UsageError, match="'x' has 2 NaN"):
            engine.run({"x": np.array([np.nan, 1, np.nan], np.float32)})
        with pytest.raises(InvalidModelError, match="'y' has 1 NaN, from inputs without"):
            engine.run({"x": np.array([-1.0, 1.0], np.float32)})
        assert engine._pool.is_idle


def test_bf16_goes_in_and_out(tmp_path: Path) -> None:
    with trtopt.Engine.load(saved(tmp_path / "b.onnx", BF16), nan="refuse") as engine:
        assert engine.inputs[0].dtype == ml_dtypes.bfloat16
        found = engine.run({"x": np.array([1.5, -3], ml_dtypes.bfloat16)})["y"]
        assert found.dtype == ml_dtypes.bfloat16 and found.tolist() == [2.25, 9]
        odd = np.array([1.0078125], ml_dtypes.bfloat16)  # its square has more bits than BF16
        assert engine.run({"x": odd})["y"].astype(np.float32) == np.float32(1.015625)
        with pytest.raises(UsageError, match="'x' is float32; the model takes bfloat16"):
            engine.run({"x": np.ones(2, np.float32)})
        with pytest.raises(UsageError, match="1 NaN"):
            engine.run({"x": np.array([np.nan, 1], ml_dtypes.bfloat16)})


def test_torch_tensors_come_back_as_such(net: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    given = feeds(1)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    with trtopt.Engine.load(net) as engine:
        found = engine.run(tensors)
        assert all(isinstance(value, torch.Tensor) for value in found.values())
        assert equal({name: value.numpy() for name, value in found.items()}, engine.run(given))
        with pytest.raises(UsageError, match="cannot be read without a copy"):
            engine.run({**tensors, "x": tensors["x"].clone().requires_grad_()})
        with pytest.raises(UsageError, match="float64"):
            engine.run({**tensors, "x": tensors["x"].double()})
    with trtopt.Engine.load(saved(tmp_path / "b.onnx", BF16)) as engine:
        found = engine.run({"x": torch.tensor([1.5, -3], dtype=torch.bfloat16)})
        assert torch.equal(found["y"], torch.tensor([2.25, 9], dtype=torch.bfloat16))


def test_a_subclass_of_torch_tensors_is_one(net: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    kind = type("Image", (torch.Tensor,), {"__module__": "torchvision.tv_tensors"})
    with trtopt.Engine.load(net) as engine:
        found = engine.run({name: torch.from_numpy(array).as_subclass(kind) for name, array in feeds(1).items()})
        assert all(isinstance(value, torch.Tensor) for value in found.values())


def test_the_reply_is_what_the_first_input_of_the_model_is(net: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    given = feeds(1)
    with trtopt.Engine.load(net) as engine:
        found = engine.run({"mask": given["mask"], "x": torch.from_numpy(given["x"])})
        assert all(isinstance(value, torch.Tensor) for value in found.values())
        found = engine.run({"mask": torch.from_numpy(given["mask"]), "x": given["x"]})
        assert all(isinstance(value, np.ndarray) for value in found.values())


def test_torch_has_no_strings(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    text = '<ir_version: 10, opset_import: ["" : 21]> net (float[N] x) => (string[N] y, float[N] z) {'
    with trtopt.Engine.load(saved(tmp_path / "s.onnx", text + " y = Cast<to = 8>(x) z = Neg(x) }")) as engine:
        found = engine.run({"x": torch.ones(2)})
        assert found["y"].tolist() == ["1", "1"] and isinstance(found["z"], torch.Tensor)


def test_a_sign_that_torch_has_not_written_yet_is_not_lost(net: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    lazy = torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag
    assert lazy.is_neg()
    with trtopt.Engine.load(net) as engine, pytest.raises(UsageError, match="resolve_neg"):
        engine.run({"x": lazy, "mask": torch.ones(2, 3)})


def test_views_of_arrays_are_read_right(net: Path) -> None:
    given = feeds(2)
    with trtopt.Engine.load(net) as engine:
        plain = engine.run(given)
        strange = {name: np.asfortranarray(array) for name, array in given.items()}
        assert equal(engine.run(strange), plain)
        for array in given.values():
            array.setflags(write=False)
        assert equal(engine.run(given), plain)


def test_a_closed_engine_refuses_calls_and_closes_again(net: Path) -> None:
    engine = trtopt.Engine.load(net)
    engine.run(feeds(0))
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.run(feeds(0))
    with pytest.raises(ClosedError, match="closed"):
        asyncio.run(engine.run_async(feeds(0)))
    assert 'kind="closed",model="net.onnx"} 2' in engine.metrics()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trtopt net")]


@pytest.mark.parametrize("drain", [True, False])
def test_closing_under_load_serves_or_refuses_what_waits(net: Path, drain: bool) -> None:
    engine = trtopt.Engine.load(net, contexts=1, queue=50)
    given = feeds(0)
    expected = engine.run(given)

    async def main() -> list[Any]:
        context = engine._pool.acquire(Turn())
        tasks = [asyncio.create_task(engine.run_async(given)) for _ in range(40)]
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="aclose"):
            engine.close()
        closing = asyncio.create_task(engine.aclose(drain=drain))
        while not engine._pool._closed:
            await asyncio.sleep(0.001)
        engine._pool.release(context)
        await closing
        return await asyncio.gather(*tasks, return_exceptions=True)

    replies = asyncio.run(main())
    if drain:
        assert all(equal(reply, expected) for reply in replies)
    else:
        assert all(isinstance(reply, ClosedError) for reply in replies)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"contexts": 0}, "contexts"),
        ({"queue": -1}, "queue"),
        ({"contexts": 1.5}, "contexts"),
        ({"nan": "maybe"}, "nan"),
        ({"cuda_graphs": -1}, "cuda_graphs"),
        ({"context": 2}, "context"),
        ({"fallback": "x.onnx"}, "net.onnx"),
        ({"key": "key.pem"}, "net.onnx"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], where: str, net: Path) -> None:
    with pytest.raises(UsageError) as error:
        trtopt.Engine.load(net, **options)
    assert error.value.where.endswith(where)


def test_files_that_are_neither_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        trtopt.Engine.load(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(InvalidModelError):
        trtopt.Engine.load(tmp_path / "text.onnx")
    sequence = """
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x) }
    """
    with pytest.raises(InvalidModelError, match="no tensor"):
        trtopt.Engine.load(saved(tmp_path / "s.onnx", sequence))


def test_an_engine_cannot_be_pickled(net: Path) -> None:
    with trtopt.Engine.load(net) as engine, pytest.raises(TypeError, match="pickle"):
        pickle.dumps(engine)


def in_a_fork(act: Callable[[], None]) -> int:
    """The exit code of a forked process that acts; 99 where it hangs."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads run: that is the point
        child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nothing of pytest may run in the child
            traceback.print_exc()
            os._exit(1)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99


def test_a_forked_process_can_load_its_own_and_is_not_held_up_by_its_parents(net: Path) -> None:
    given = feeds(0)
    with trtopt.Engine.load(net, contexts=2) as engine:
        expected = engine.run(given)
        running = engine._pool.acquire(Turn())

        def act() -> None:
            with trtopt.Engine.load(net) as own:
                assert equal(own.run(given), expected)
            for call in (engine.metrics, lambda: engine.run(given), lambda: asyncio.run(engine.run_async(given))):
                with pytest.raises(UsageError, match="load it in each worker process"):
                    call()
            engine.close()

        # other threads of this process hold these in the moment of the fork
        with _LIMIT._lock, engine._pool._lock:
            code = in_a_fork(act)
        engine._pool.release(running)
    assert code == 0


def test_a_runner_that_raises_stop_iteration_does_not_hang_a_coroutine(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trtopt.Engine.load(net) as engine:

        def stop(*_: object) -> dict[str, Any]:
            raise StopIteration

        monkeypatch.setattr(engine, "_compute", stop)
        with pytest.raises(RuntimeError, match="StopIteration"):
            asyncio.run(asyncio.wait_for(engine.run_async(feeds(0)), 10))


END_OF_MAIN = """
import asyncio, sys, threading, time
import numpy as np, trtopt
from trtopt.serve.pool import Turn

engine = trtopt.Engine.load(sys.argv[1], contexts=1, queue=2000)
given = {"x": np.ones((1, 1), np.float32), "mask": np.ones((1, 1), np.float32)}
context = engine._pool.acquire(Turn())

async def serve():
    waiting = [asyncio.create_task(engine.run_async(given)) for _ in range(2000)]
    await asyncio.sleep(0)
    main.join()
    time.sleep(0.3)
    engine._pool.release(context)
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    kinds = {type(reply).__name__ for reply in replies}
    again = await asyncio.gather(engine.run_async(given), return_exceptions=True)
    print(kinds, again, engine._pool.state, engine.run(given)["y"].shape)

main = threading.main_thread()
threading.Thread(target=lambda: asyncio.run(serve())).start()
"""


def test_a_loop_that_outlives_the_main_thread_gets_errors_and_ends(net: Path) -> None:
    command = [sys.executable, "-c", END_OF_MAIN, str(net)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0 and "exception calling callback" not in ended.stderr, ended.stderr[-2000:]
    assert ended.stdout.startswith("{'ResourceError'} [ResourceError("), ended.stdout
    assert ended.stdout.endswith("(0, 0) (1, 1)\n")


def test_metrics_of_several_engines_are_one_text(net: Path, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client")
    other = saved(tmp_path / "other.onnx", NET)
    with trtopt.Engine.load(net) as one, trtopt.Engine.load(other) as two, trtopt.Engine.load(net) as three:
        two.run(feeds(0))
        text = one.metrics(two)
        assert text.count("# TYPE trtopt_latency_seconds ") == 1
        samples = [item for family in parser.text_string_to_metric_families(text) for item in family.samples]
        counts = {item.labels["model"]: item.value for item in samples if item.name == "trtopt_latency_seconds_count"}
        assert counts == {"net.onnx": 0, "other.onnx": 1}
        with pytest.raises(UsageError, match=r"two engines are named 'net\.onnx'"):
            one.metrics(three)
        three.name = "again"
        assert 'model="again"' in one.metrics(two, three)


def built(folder: Path, **changes: Any) -> Path:
    """An engine that cannot run here, made from the model NET."""
    if probe().gpu is not None:
        pytest.skip("this machine has a GPU, and the engine is made up")
    ranges = (ShapeRange((1, 1), (8, 8), (16, 16)),)
    tensors = {
        "inputs": tuple(EngineTensor(name, "float32", ("N", "K"), "chw", ranges) for name in ("x", "mask")),
        "outputs": (EngineTensor("y", "float32", ("N", "K")), EngineTensor("best", "float32", ("N",))),
        "host": None,
    }
    data = rtx_engine()
    return save(folder, data, manifest(data, **{**tensors, **changes}))


def test_an_engine_without_its_gpu_says_what_to_do(net: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no GPU") as error:
        trtopt.Engine.load(built(tmp_path))
    assert error.value.exit_code == 4 and "fallback=" in error.value.remedy


def test_the_fallback_serves_and_never_silently(net: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = built(tmp_path)
    with caplog.at_level(logging.WARNING, "trtopt.serve"), trtopt.Engine.load(path, fallback=net) as engine:
        assert "on the CPU, in place of tensorrt-rtx 1.7.1.116" in engine.runtime
        assert "no GPU" in engine.fallback_reason and engine.name == "m.engine"
        ones = np.ones((16, 16), np.float32)
        np.testing.assert_allclose(engine.run({"x": ones, "mask": ones})["y"], np.tanh(ones), rtol=1e-6)
        more = np.ones((17, 16), np.float32)
        with pytest.raises(UsageError, match=r"\[17, 16\] .* outside of what the engine was built for: \[1, 1\] to"):
            engine.run({"x": more, "mask": more})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "runs in its place" in caplog.records[0].getMessage()


def test_a_fallback_that_is_another_model_is_refused(net: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.onnx", NET.replace("Tanh", "Sigmoid"))
    path = built(tmp_path, onnx_sha256=file_hash("", net.read_bytes()).sha256)
    trtopt.Engine.load(path, fallback=net).close()
    with pytest.raises(IntegrityError, match="hash"):
        trtopt.Engine.load(path, fallback=other)
    path = built(tmp_path)  # without a hash, names, types and shapes have to agree
    trtopt.Engine.load(path, fallback=other).close()
    for old, new, message in (
        ("float[N] best", "float[N] top", "outputs are y, top"),
        ("float[N, K] mask", "float[N, 7] mask", "'mask'"),
        ("float[N, K] x", "float16[N, K] x", "'x' is float16"),
    ):
        text = NET.replace(old, new).replace("best =", "top =" if "top" in new else "best =")
        text = text.replace("Tanh(x)", "Cast <to = 1> (x)") if "float16" in new else text
        with pytest.raises(IntegrityError, match=message):
            trtopt.Engine.load(path, fallback=saved(tmp_path / "wrong.onnx", text))


def test_an_altered_engine_is_refused_whatever_stands_by(net: Path, tmp_path: Path) -> None:
    path = built(tmp_path)
    path.write_bytes(rtx_engine(seed=1))
    with pytest.raises(IntegrityError, match="not the one that its manifest describes"):
        trtopt.Engine.load(path, fallback=net)
    path = built(tmp_path)
    path.with_name("m.engine.manifest.json").unlink()
    with pytest.raises(UsageError, match="no manifest"):
        trtopt.Engine.load(path, fallback=net)
    with pytest.raises((TargetError, MissingDependencyError)):
        trtopt.Engine.load(path, allow_unverified=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "junk"}, "'x' has the type 'junk'"),
        ({"dtype": "O"}, "'x' has the type 'O'"),
        ({"ranges": (ShapeRange((1, 1), (8, 8), (16, 16)),) * 2}, "profiles of its inputs"),
        ({"ranges": (ShapeRange((1,), (8,), (16,)),)}, "profiles of its inputs"),
    ],
)
def test_a_manifest_that_cannot_be_of_an_engine_is_refused(
    changes: dict[str, Any], message: str, net: Path, tmp_path: Path
) -> None:
    path = built(tmp_path)
    x, mask = verify(path).inputs
    path = built(tmp_path, inputs=(dataclasses.replace(x, **changes), mask))
    with pytest.raises(IntegrityError, match=message):
        trtopt.Engine.load(path, fallback=net)


SECOND = """
<ir_version: 10, opset_import: ["" : 21]>
host (float[N, K] y, float[N, K] x) => (float[N, K] z) { z = Sub(y, x) }
"""


def test_the_part_for_the_host_runs_behind_the_same_call(net: Path, tmp_path: Path) -> None:
    host = saved(tmp_path / "net.host.onnx", SECOND)
    given = feeds(3)
    expected = np.tanh(given["x"]) * given["mask"] - given["x"]
    with trtopt.Engine.load(net) as engine:
        found = engine.run(given)
        assert list(found) == ["y", "best", "z"] and [spec.name for spec in engine.outputs] == ["y", "best", "z"]
        np.testing.assert_allclose(found["z"], expected, rtol=1e-5, atol=1e-6)
    parts = manifest(b"", file_hash("net.host.onnx", host.read_bytes())).host
    assert parts is not None
    own = {"inputs": ("y", "x"), "outputs": ("z",), "model_outputs": ("z", "best")}
    path = built(tmp_path, host=parts.__class__(parts.files, **own))
    with trtopt.Engine.load(path, fallback=net) as engine:
        given = {name: array[:8, :8] for name, array in given.items()}
        found = engine.run(given)
        assert list(found) == ["z", "best"]
        np.testing.assert_allclose(found["z"], expected[:8, :8], rtol=1e-5, atol=1e-6)


def test_a_host_part_of_another_model_is_left_alone(
    net: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "net.host.onnx", SECOND.replace("y", "q"))
    with caplog.at_level(logging.INFO, "trtopt.serve"), trtopt.Engine.load(net) as engine:
        assert list(engine.run(feeds(0))) == [spec.name for spec in engine.outputs]
    assert "net.host.onnx is not of net.onnx, which has no q" in caplog.text


def test_memory_stays_flat_over_many_calls(net: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    calls = [feeds(seed) for seed in range(50)]

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    with trtopt.Engine.load(net) as engine:

        def run(count: int) -> None:
            for index in range(count):
                engine.run(calls[index % len(calls)])

        run(4000)
        gc.collect()
        objects, before = len(gc.get_objects()), resident_bytes()
        run(16000)
        gc.collect()
        assert len(gc.get_objects()) - objects < 100
        assert resident_bytes() - before < 4 << 20
        assert engine.latency.count == 20000
