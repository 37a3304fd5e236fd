"""examples/serve: batches, refusals, and a stop that loses nothing, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

for package in ("onnxruntime", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=f"needs {package}")
ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "serve"), str(ROOT / "benchmarks" / "serve")]

import app  # noqa: E402
from app import Service, Settings  # noqa: E402
from generator import Load  # noqa: E402
from tasks import Digits, Images, Picture, Pixels, RequestError, Text, Texts  # noqa: E402

import trtopt  # noqa: E402
from trtopt.errors import UsageError  # noqa: E402

APP = ROOT / "examples" / "serve" / "app.py"
MAX_QUEUE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of an image [batch, 1, 8, 8], slow enough for a queue to fill; convolutions, whose images do not know of
    each other to the last bit."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[batch, 1, 8, 8] input) => (float[batch, 10] scores) {
        a = Conv <pads = [1, 1, 1, 1]> (input, w0)
        b = Relu(a)
        c = Conv <pads = [1, 1, 1, 1]> (b, w1)
        d = Relu(c)
        e = Conv(d, w2)
        f = GlobalAveragePool(e)
        scores = Flatten(f)
    }"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("w0", (320, 1, 3, 3)), ("w1", (320, 320, 3, 3)), ("w2", (10, 320, 1, 1))):
        proto.graph.initializer.append(
            numpy_helper.from_array((rng.standard_normal(shape) / 16).astype(np.float32), name)
        )
    path = tmp_path_factory.mktemp("model") / "slow.onnx"
    onnx.save(proto, path)
    return path


class Running:
    """The service in a process of its own."""

    def __init__(self, model: Path, stderr: int | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        options = f"--max-batch 4 --max-queue {MAX_QUEUE} --drain-s 0.3 --port {self.port}".split()
        self.process = subprocess.Popen(
            [sys.executable, str(APP), "digits", str(model), *options], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready: slow.onnx in onnxruntime")
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Status and body of one request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def count(self, result: str) -> int:
        """How many requests came to that end."""
        found = re.search(rf'app_requests_total{{result="{result}"}} (\d+)', self.ask("/metrics")[1])
        return int(found[1]) if found else 0

    def stopped(self) -> tuple[int, int]:
        """After SIGTERM: how many requests it says it accepted, and answered."""
        assert self.process.stdout is not None
        accepted, answered = re.findall(r"\d+", self.process.stdout.read())
        self.process.wait(30)
        return int(accepted), int(answered)


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Running]:
    """One for the tests that leave it running."""
    yield from started(model)


@pytest.fixture
def stopping(model: Path) -> Iterator[Running]:
    """One for a test that stops it."""
    yield from started(model)


def started(model: Path) -> Iterator[Running]:
    running = Running(model)
    yield running
    running.process.kill()
    running.process.wait()


def bodies(count: int = 16) -> list[bytes]:
    images = np.random.default_rng(1).integers(0, 17, (count, 64)) / 16
    return [json.dumps({"pixels": image}).encode() for image in images.tolist()]


@pytest.mark.long
def test_more_than_it_can_take_and_then_a_sigterm(stopping: Running) -> None:
    load = Load("127.0.0.1", stopping.port, bodies())
    received = 0

    async def steps() -> None:
        nonlocal received
        await load.run_serially()
        received += load.tally.statuses["200"]
        assert received == 16
        rate = await load.run_closed(1.5, clients=4)
        assert set(+load.tally.statuses) == {"200"} and load.tally.wrong == 0
        received += load.tally.statuses["200"]
        await load.run_closed(1.5, clients=64)  # of which so many cannot wait, however slow the machine is
        assert set(+load.tally.statuses) == {"200", "503"}
        assert (load.tally.wrong, load.tally.without_retry_after) == (0, 0)
        received += load.tally.statuses["200"]
        asyncio.get_running_loop().call_later(0.5, stopping.process.send_signal, signal.SIGTERM)
        tally = await load.run_open(2, 4 * rate)
        assert tally.refused > 0 and tally.wrong == 0, "it goes on accepting after SIGTERM"
        received += tally.statuses["200"]

    asyncio.run(steps())
    assert stopping.stopped() == (received, received)


def test_what_is_no_request_is_refused_before_it_joins_a_batch(service: Running) -> None:
    good = bodies(1)[0]
    accepted, invalid = service.count("accepted"), service.count("invalid")
    status, reply = service.ask("/predict", good)
    assert status == 200
    assert json.loads(reply)["digit"] == int(np.argmax(json.loads(reply)["scores"]))
    for body, status, where in (
        (b'{"pixels": [2]}', 422, "body.pixels"),
        (json.dumps({"pixels": [0.5] * 63 + [7]}).encode(), 422, "body.pixels.63"),
        (json.dumps({"pixels": [0.5] * 63 + [float("nan")]}).encode(), 422, "body.pixels.63"),
        (b'{"text": "a"}', 422, "body.pixels"),
        (b"{", 422, "body"),
        (b" " * 5000, 413, "the body"),
        (b'{"pixels": "\xff"}', 400, "/predict"),
        (b"[" * 4000, 400, "/predict"),
    ):
        found, reply = service.ask("/predict", body)
        assert found == status and where in reply["error"]["where"] and reply["error"]["remedy"], reply
    with socket.create_connection(("127.0.0.1", service.port)) as chunked:
        chunked.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert chunked.recv(99).startswith(b"HTTP/1.1 411")
    assert service.ask("/health/live") == (200, '{"status":"live"}')
    assert service.ask("/health/ready") == (200, '{"status":"ready"}')
    assert (service.count("accepted") - accepted, service.count("invalid") - invalid) == (1, 7)
    for path, body, status in (("/predict", None, 405), ("/metrics", b"{}", 405), ("/none", None, 404)):
        found, reply = service.ask(path, body)
        assert found == status and reply["error"]["where"] == path, reply
    _, metrics = service.ask("/metrics")
    assert "queue_length 0.0" in metrics and "trtopt_engine_info" in metrics


def test_clients_that_hang_up_change_nobody_elses_reply(service: Running) -> None:
    load = Load("127.0.0.1", service.port, bodies())
    asyncio.run(load.run_serially())
    gone = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(3)]
    for client in gone:
        client.sendall(load.requests[3])
        client.close()
    again = Load("127.0.0.1", service.port, bodies())
    again.serial = load.serial
    asyncio.run(again.run_closed(0.5, clients=1))
    assert again.tally.wrong == 0 and again.tally.statuses["200"] > 0
    assert service.count("accepted") == service.count("answered")


def test_it_says_that_it_is_not_ready_while_it_drains(stopping: Running) -> None:
    with socket.create_connection(("127.0.0.1", stopping.port)) as kept:
        kept.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in kept.recv(999)
        stopping.process.terminate()
        found = b""
        while b"503" not in found:
            kept.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            found = kept.recv(999)
            assert found
        assert b"connection: close" in found
    assert stopping.stopped() == (0, 0)


def test_a_digit_is_the_largest_score() -> None:
    task = Digits()
    row = task.prepare(Pixels(pixels=[0.25] * 64))
    assert row["input"].shape == (1, 8, 8) and row["input"].dtype == np.float32
    scores = np.arange(10, dtype=np.float32)[::-1].copy()
    assert task.answer(row, {"scores": scores}).model_dump() == {"digit": 0, "scores": scores.tolist()}


IMAGE_NET = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 3, 8, 8] pixels) => (float[batch, 3] scores) { scores = ReduceMean <keepdims = 0> (pixels, axes) }
"""


@pytest.fixture(scope="module")
def means(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose scores are the means of red, green and blue."""
    proto = onnx.parser.parse_model(IMAGE_NET)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3]), "axes"))
    path = tmp_path_factory.mktemp("means") / "means.onnx"
    onnx.save(proto, path)
    return path


def test_a_picture_gets_its_classes_and_what_is_none_is_refused(means: Path) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    service = Service(Images("scale=255"), Settings(means, max_batch=2))
    file = io.BytesIO()
    image_module.new("RGB", (20, 10), (0, 255, 51)).save(file, "PNG")
    row = service.task.prepare(Picture(image=base64.b64encode(file.getvalue()).decode()))
    assert row["pixels"].shape == (3, 8, 8)
    (found,) = service._split([row], service.engine.run(service._stacked([row])))
    reply = service.task.answer(row, found).model_dump()
    assert reply["classes"] == [1, 2, 0] and reply["scores"] == pytest.approx([1.0, 0.2, 0.0])
    for content in ("%%%", base64.b64encode(b"no picture").decode()):
        with pytest.raises(RequestError, match="picture"):
            service.task.prepare(Picture(image=content))


def test_a_model_without_pictures_is_none_for_images(tmp_path: Path) -> None:
    graph = '<ir_version: 10, opset_import: ["" : 21]> g (float[b, 64] x) => (float[b, 64] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(graph), tmp_path / "m.onnx")
    with pytest.raises(UsageError):
        Service(Images("scale=255"), Settings(tmp_path / "m.onnx"))


def test_the_fallback_runs_where_the_engine_cannot(means: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="the engine is one of TensorRT for RTX")
    pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    engine, onnx_model = tmp_path / "means.rtx.engine", tmp_path / "means.onnx"
    trtopt.build(means, output=engine, save_onnx=onnx_model, gpu="L4", precision="fp32", cache_dir=tmp_path / "cache")
    service = Service(Images("scale=255"), Settings(engine, fallback=onnx_model))
    assert "onnxruntime" in service.engine.runtime or service.engine.fallback_reason == ""


def test_a_text_is_embedded_without_its_padding(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    task = Texts(tmp_path / "tokenizer.json", longest=40)
    row = task.prepare(Text(text="a b unheard c"))
    assert {name: array.shape for name, array in row.items()} == {
        "input_ids": (16,), "attention_mask": (16,), "token_type_ids": (16,),
    }  # fmt: skip
    assert row["input_ids"][:5].tolist() == [1, 2, 0, 3, 0] and row["attention_mask"].sum() == 4
    states = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    mean = states[:4].mean(axis=0)
    found = task.answer(row, {"last_hidden_state": states}).model_dump()["embedding"]
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), rtol=1e-6)
    with pytest.raises(RequestError, match="no token"):
        task.prepare(Text(text=" \n"))
    assert task.prepare(Text(text="a " * 17))["input_ids"].shape == (32,)
    assert task.prepare(Text(text="a " * 99))["input_ids"].shape == (40,)


WRONG = pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits", "none.onnx"), "cannot be read"),
        (("digits", "MODEL", "--max-queue", "0"), "0 is too small"),
        (("digits", "MODEL", "--max-delay-ms", "nan"), "nan is too small"),
        (("digits", "MODEL", "--max-delay-ms", "inf"), "inf is too large"),
        (("digits", "MODEL", "--port", "70000"), "cannot have this address"),
        (("text", "MODEL", "--tokenizer", "none.json"), "There is no such file"),
        (("text", "MODEL", "--tokenizer", "MODEL"), "The file is not a tokenizer"),
    ],
)


@WRONG
@pytest.mark.long
def test_it_does_not_start_with_what_is_wrong(arguments: tuple[str, ...], message: str, model: Path) -> None:
    given = [str(model) if part == "MODEL" else part for part in arguments]
    done = subprocess.run([sys.executable, str(APP), *given], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and message in done.stderr and "remedy:" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@WRONG
def test_what_is_wrong_is_one_error(
    arguments: tuple[str, ...],
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As above, within this process."""
    given = [str(model) if part == "MODEL" else part for part in arguments]
    if "--port" not in given:
        given += ["--port", "0"]
    monkeypatch.setattr(sys, "argv", ["app.py", *given])
    monkeypatch.setattr(app.Server, "run", lambda *_, **__: pytest.fail("it starts"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            app.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and "remedy:" in said, said


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("(float[b, 1, 8, 8] image) => (float[b, 64] y) { y = Flatten(image) }", "the input image, and the task gives"),
        ("(float[1, 1, 8, 8] input) => (float[1, 64] y) { y = Flatten(input) }", "the model takes [1, 1, 8, 8]"),
        (
            "(float[b, 1, 8, 8] input) => (float y) { y = ReduceSum<keepdims = 0>(input) }",
            "output y has the shape []",
        ),
        (
            "(float[b, 1, 8, 8] input) => (float[c, 64] y) { x = Flatten(input) y = Concat <axis = 0> (x, x) }",
            "[2, 64]",
        ),
    ],
)
def test_a_model_that_is_not_one_for_the_task_is_refused(graph: str, message: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {graph}'), tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=re.escape(message)):
        Service(Digits(), Settings(tmp_path / "m.onnx"))


def test_an_address_in_use_is_one_error_before_the_model_is_loaded(service: Running) -> None:
    done = subprocess.run(
        [sys.executable, str(APP), "digits", "none.onnx", "--port", str(service.port)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "address" in done.stderr.lower() and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("given", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_ends_it_without_a_traceback(given: signal.Signals, model: Path) -> None:
    running = Running(model, stderr=subprocess.STDOUT)
    assert running.process.stdout is not None
    running.process.send_signal(given)
    said = running.process.stdout.read()
    assert "stopped: 0 requests accepted" in said and "Traceback" not in said
    assert running.process.wait(30) == 128 + given
