"""An engine, or an ONNX model, inside a service: ``trtopt.Engine``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trtopt.errors import ResourceError, TrtoptError, UsageError
from trtopt.serve.load import Loaded, LoadSettings, load
from trtopt.serve.metrics import Counters, Family, Latency, exposition, histogram
from trtopt.serve.pool import Place, Pool, Turn
from trtopt.serve.tensors import CallInput, InputChecker, TensorSpec, as_torch, check_nan, is_torch, zeros_like

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from trtopt.serve.load import EngineOptions


_forks: list[int] = []
"""This process, where it was forked after this module was imported; else nothing."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


class Engine:
    """A model that answers calls from any number of threads and event loops. Made by :meth:`load`; close it at the end.

    Attributes:
        name: The label ``model`` of the metrics: the file's name, until it is set to another.
        runtime: What runs it: ``tensorrt-rtx 1.7.1.116 on NVIDIA L4``, ``onnxruntime 1.31.1 on the CPU``.
        fallback_reason: Why the engine does not run and its model runs in its place; empty where that is not so.
        inputs: What a call gives.
        outputs: What it gets.
    """

    def __init__(self, loaded: Loaded, contexts: int, queue: int, nan: Literal["allow", "refuse"]) -> None:
        self.name = loaded.name
        self.runtime = loaded.runner.runtime
        self.fallback_reason = loaded.fallback_reason
        self.inputs: tuple[TensorSpec, ...] = loaded.inputs
        self.outputs: tuple[TensorSpec, ...] = loaded.runner.outputs
        self._runner = loaded.runner
        self._first = self.inputs[0].name if self.inputs else ""
        self._check = InputChecker(self.inputs, takes_gpu=loaded.runner.takes_gpu).check
        self._compute = functools.partial(_without_nan, loaded.runner.run) if nan == "refuse" else loaded.runner.run
        self._pool = Pool(contexts, queue)
        self._counters = Counters()
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(contexts, thread_name_prefix=f"trtopt {self.name}")
        self._own = threading.local()

    def __repr__(self) -> str:
        names = (", ".join(item.name for item in items) for items in (self.inputs, self.outputs))
        return f"<trtopt.Engine {self.name}: {' -> '.join(names)}, {self.runtime}>"

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        fallback: str | os.PathLike[str] | None = None,
        contexts: int = 2,
        queue: int = 64,
        nan: Literal["allow", "refuse"] = "allow",
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """Load an engine, checked against its manifest, or an ONNX model, which ONNX Runtime runs on the CPU.

        A part of the model for the host, as ``trtopt build`` writes it beside both, runs behind the same call.

        Args:
            path: An engine of ``trtopt build``, or an ONNX model.
            fallback: What runs where the engine cannot, by ONNX Runtime: the optimized model of ``--save-onnx``. A
                warning is logged, and :attr:`runtime` says so.
            contexts: How many calls run at a time.
            queue: How many more may wait; the next one is refused.
            nan: ``refuse`` looks at every value of every call and refuses NaN in inputs and outputs.
            options: ``key``, ``allow_unverified``, ``cuda_graphs``, ``plugins`` and ``weight_budget``, see
                :class:`~trtopt.serve.load.EngineOptions`.

        Raises:
            UsageError: A file cannot be read, or an argument is wrong.
            IntegrityError: The engine, its manifest or its part for the host was altered; or ``fallback`` is not its
                model.
            InvalidModelError: The model is invalid, or ONNX Runtime cannot run it.
            TargetError: The engine's GPU is not here, and there is no ``fallback``.
            MissingDependencyError: Its runtime is not installed.

        Example:
            >>> with trtopt.Engine.load("model.onnx") as engine:
            ...     engine.run({"x": np.zeros((2, 3, 8, 8), np.float32)})["scores"].shape
            (2, 10)
        """
        for option, value, least in (("contexts", contexts, 1), ("queue", queue, 0)):
            if not isinstance(value, int) or value < least:
                raise UsageError(
                    f"{option} is {value!r}", where=option, remedy=f"give a whole number of at least {least}"
                )
        if nan not in ("allow", "refuse"):
            raise UsageError(f"nan is {nan!r}", where="nan", remedy="give 'allow' or 'refuse'")
        chosen = LoadSettings.of(contexts, None if fallback is None else Path(fallback), options)
        return cls(load(Path(path), chosen), contexts, queue, nan)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model; waits for a free context. Thread-safe.

        Args:
            inputs: Arrays by input name: numpy, or anything that speaks DLPack (torch, cupy). Type and shape are those
                of :attr:`inputs`; nothing is converted, and what is contiguous is not copied.

        Returns:
            Outputs by name: torch tensors where the first of :attr:`inputs` is given as one, else numpy arrays;
            strings are numpy arrays always.

        Raises:
            UsageError: A name, type or shape is wrong, or an input has NaN and they are refused.
            QueueFullError: As many calls as may wait do.
            ClosedError: The engine is closed.
            InvalidModelError, EngineBuildError: The model fails.
            ResourceError: It runs for half an hour, or the process can start no thread.
        """
        began = time.perf_counter()
        turn, pool = Turn(), self._pool
        try:
            if _forks:
                self._check_process()
            feeds = self._check(inputs)
            context = pool.acquire(turn)
            outputs = self._compute(context, feeds)
        except BaseException as error:
            self._counters.failed(_kind(error))
            raise
        finally:
            try:
                pool.end(turn)
            except BaseException:  # a signal handler has raised in there
                pool.end(turn)
                raise
        self._counters.replied(time.perf_counter() - began)
        return _like(inputs.get(self._first), outputs)

    def first_states(self, batch: int = 1, like: Any = None) -> dict[str, Any]:
        """What a decoder's states are before the first step: caches that grow are empty, others are zeros.

        A step is ``run({**states, ...})``; :meth:`next_states` takes those of the next one from its reply. They stay
        where they are: on a GPU with tensors there, and without a copy on the CPU.

        Args:
            batch: The size of the first axis, where that is dynamic.
            like: A torch tensor, whose device they are on; None for numpy arrays.

        Returns:
            By the name of the input: an array of the type of :attr:`inputs`; nothing for a model without states.

        Raises:
            UsageError: ``batch`` is no size.

        Example:
            ``states = engine.first_states()``, then for each token ``reply = engine.run({"ids": token, **states})`` and
            ``states = engine.next_states(reply)``.
        """
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise UsageError(f"A batch of {batch!r}", where="engine.first_states", remedy="give 1 or more")
        found: dict[str, Any] = {}
        for spec in (spec for spec in self.inputs if spec.state):
            sizes = enumerate(spec.shape or ())
            shape = tuple(dim if isinstance(dim, int) else (0 if axis else batch) for axis, dim in sizes)
            found[spec.name] = zeros_like(like, shape, spec.dtype)
        return found

    def next_states(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The states that a step hands on to the next, by the names of the inputs.

        Raises:
            UsageError: The reply has not all of them.
        """
        missing = [spec.state for spec in self.inputs if spec.state and spec.state not in reply]
        if missing:
            raise UsageError(
                f"The reply has no {', '.join(missing)}", where="engine.next_states", remedy="give what run() returned"
            )
        return {spec.name: reply[spec.state] for spec in self.inputs if spec.state}

    async def run_async(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`run`, for coroutines, of any event loop: the loop is never blocked.

        A call that is cancelled while it waits leaves the queue; one that runs ends unheard.
        """
        began = time.perf_counter()
        try:
            if _forks:
                self._check_process()
            feeds = self._check(inputs)
            outputs = await self._reply(feeds)
        except BaseException as error:
            self._counters.failed(_kind(error))
            raise
        self._counters.replied(time.perf_counter() - began)
        return _like(inputs.get(self._first), outputs)

    def metrics(self, *others: Engine) -> str:
        """What Prometheus scrapes, in its text format: calls and their latency, errors by kind, queue and contexts.

        Args:
            others: Further engines of the process, whose metrics are in the same text, as the format wants it.

        Raises:
            UsageError: Two of them have the same name; or the process was forked since the engine was loaded.
            MissingDependencyError: prometheus_client is not installed (the extra ``serve``).
        """
        engines = (self, *others)
        for name, count in Counter(engine.name for engine in engines).items():
            if count > 1:
                raise UsageError(
                    f"The metrics of two engines are named {name!r}",
                    where="engine.metrics",
                    remedy="set engine.name of one of them after loading",
                )
        return exposition({engine.name: engine._families() for engine in engines})

    def _families(self) -> list[Family]:
        self._check_process()
        busy, waiting = self._pool.state
        errors, graphs = self._counters.errors, self._runner.graph_counts
        families = [
            Family("trtopt_engine_info", "gauge", "What runs the model", [("", {"runtime": self.runtime}, 1)]),
            histogram(self._counters.latency),
            Family("trtopt_errors", "counter", "Calls that failed", _by("kind", errors)),
            Family("trtopt_queue_length", "gauge", "Calls that wait for a context", [("", {}, waiting)]),
            Family("trtopt_contexts", "gauge", "Calls that can run at a time", [("", {}, self._pool.contexts)]),
            Family("trtopt_contexts_busy", "gauge", "Calls that run", [("", {}, busy)]),
        ]
        if graphs:
            help_text = "CUDA graphs captured, replayed, not captured for an error, and dropped"
            families.append(Family("trtopt_cuda_graphs", "counter", help_text, _by("event", graphs)))
        return families

    @property
    def latency(self) -> Latency:
        """The latency histogram as it is now, for an observable instrument of OpenTelemetry."""
        return self._counters.latency

    def close(self, *, drain: bool = True) -> None:
        """Refuse new calls, wait for those that run, and free the memory.

        Closing twice does nothing, nor does closing in a process that was forked after loading.

        Args:
            drain: Whether those that wait run first; else they get :class:`~trtopt.errors.ClosedError`.

        Raises:
            UsageError: An event loop runs in this thread, and calls that may be its own are not done:
                ``await engine.aclose()``.
        """
        if os.getpid() != self._process:  # nothing of it is here, and a lock may be held for ever
            return
        if _in_event_loop() and not self._pool.is_idle:
            raise UsageError(
                "close() would block the event loop that the engine's calls need to end",
                where="engine.close()",
                remedy="await engine.aclose()",
            )
        self._pool.close(drain=drain)
        self._executor.shutdown()
        self._runner.close()

    async def aclose(self, *, drain: bool = True) -> None:
        """:meth:`close` for coroutines."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.close(drain=drain))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                "The engine was loaded before this process was forked; its threads are not here",
                where=f"process {os.getpid()}",
                remedy="load it in each worker process",
            )

    async def _reply(self, feeds: dict[str, CallInput]) -> dict[str, Any]:
        """The outputs, computed by a thread of the engine as soon as a context is free."""
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # The thread that gives the context back starts the call: by way of the event loop it would be idle meanwhile.
        place = Place(lambda: self._start(feeds, reply, place))
        context = self._pool.request(place)
        if context is not None:
            self._submit(context, feeds, reply)
        try:
            return await reply
        except BaseException:
            self._pool.leave(place)
            raise

    def _start(self, feeds: dict[str, CallInput], reply: asyncio.Future[dict[str, Any]], place: Place) -> None:
        if place.context is not None:
            self._submit(place.context, feeds, reply)
        else:
            _deliver(reply, None, place.error)

    def _submit(self, context: int, feeds: dict[str, CallInput], reply: asyncio.Future[dict[str, Any]]) -> None:
        """Have a thread of the engine compute it: this one, where it is one and has nothing to do after its own."""
        todo = getattr(self._own, "todo", None)
        if todo == [] and threading.main_thread().is_alive():
            todo.append((context, feeds, reply))
            return
        try:
            self._executor.submit(self._work, context, feeds, reply)
        except RuntimeError as error:  # no call of a coroutine can be started: the main thread has ended, as a rule
            unserved = functools.partial(_unserved, str(error))
            _deliver(reply, None, unserved())
            self._pool.refuse(unserved)  # all at once: each of them would come here from the one before
            self._pool.release(context)

    def _work(self, *call: Any) -> None:
        """Compute a call, and then what came to this thread with the context that it gave back."""
        todo = self._own.todo = [call]
        while todo:
            self._answer(*todo.pop())
        self._own.todo = None

    def _answer(self, context: int, feeds: dict[str, CallInput], reply: asyncio.Future[dict[str, Any]]) -> None:
        """Compute the outputs for a coroutine; for one that was cancelled meanwhile, give the context back."""
        outputs = failure = None
        try:
            if not reply.cancelled():
                outputs = self._compute(context, feeds)
        except BaseException as error:  # noqa: BLE001 - the coroutine raises it
            failure = error
        self._pool.release(context)
        _deliver(reply, outputs, failure)


def _without_nan(
    run: Callable[[int, dict[str, CallInput]], dict[str, Any]], context: int, feeds: dict[str, CallInput]
) -> dict[str, Any]:
    check_nan(feeds, outputs=False)
    outputs = run(context, feeds)
    check_nan(outputs, outputs=True)
    return outputs


def _deliver(
    reply: asyncio.Future[dict[str, Any]], outputs: dict[str, Any] | None, error: BaseException | None
) -> None:
    """Give a coroutine what came of its call, from any thread."""

    def wake() -> None:
        if reply.done():  # cancelled meanwhile
            return
        if error is not None:  # a coroutine cannot raise StopIteration
            reply.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
        elif outputs is not None:
            reply.set_result(outputs)

    with contextlib.suppress(RuntimeError):  # its event loop is closed
        reply.get_loop().call_soon_threadsafe(wake)


def _unserved(why: str) -> ResourceError:
    return ResourceError(
        f"The call cannot be handed to a thread of the engine: {why}",
        where="engine.run_async",
        remedy="keep the main thread until the event loop has ended; or allow the process more threads",
    )


def _kind(error: BaseException) -> str:
    if isinstance(error, TrtoptError):
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"


def _by(label: str, values: Mapping[str, int]) -> list[tuple[str, dict[str, str], float]]:
    return [("_total", {label: key}, value) for key, value in sorted(values.items())]


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _like(first: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs as what the first input is: torch tensors on the same memory, or as they are."""
    if type(first) is np.ndarray or not is_torch(first):
        return outputs
    return {
        name: as_torch(value) if isinstance(value, np.ndarray) and value.dtype.kind != "O" else value
        for name, value in outputs.items()
    }
