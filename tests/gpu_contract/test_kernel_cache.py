"""What TensorRT for RTX compiles as an engine runs is kept, and compiled when it is asked to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from machine import Machine
from plans import X, doubling

import trtopt
from trtopt.cache.folder import KERNELS
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, EngineHeader, RuntimeOptions, identify
from trtopt.engine.kernel_cache import kernel_key
from trtopt.engine.manifest import VerifiedEngine, runtime_options
from trtopt.engine.run import EngineSession
from trtopt.errors import UsageError
from trtopt.hardware.probe import Probe
from trtopt.hardware.spec import find_gpu
from trtopt.serve.gpu import GpuRunner

pytestmark = pytest.mark.parametrize("machine", ["tensorrt_rtx-1.7.1.116"], indirect=True)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.engine.kernel_cache.probe", lambda: Probe(find_gpu("L4"), "NVIDIA L4", "580.1"))


@contextlib.contextmanager
def serving(machine: Machine, folder: Path) -> Iterator[GpuRunner]:
    data = machine.engine(doubling())
    verified = VerifiedEngine(Path("m.engine"), data, *identify(data), None)
    runner = GpuRunner(verified, runtime_options(verified, kernels=folder), 2, 0)
    try:
        yield runner
    finally:
        runner.close()


def entry(folder: Path) -> Path:
    (found,) = (folder / KERNELS).glob("*.entry")
    return found


def test_a_kernel_is_compiled_once_for_all_contexts_and_processes(machine: Machine, tmp_path: Path) -> None:
    with serving(machine, tmp_path) as runner:
        for lane in (0, 1, 0):
            np.testing.assert_array_equal(runner.run(lane, {"x": X})["y"], 2 * X)
    assert len(machine.compiled) == 1
    plan = next(iter(machine.plans.values()))
    with EngineSession(machine.engine(plan), TENSORRT_RTX, RuntimeOptions(kernels=tmp_path)) as session:
        session.run({"x": X})
        assert len(machine.compiled) == 1
        session.run({"x": X[:1]})
    assert len(machine.compiled) == 2
    with EngineSession(machine.engine(plan), TENSORRT_RTX, RuntimeOptions(kernels=tmp_path)) as session:
        session.run({"x": X[:1]})
    assert len(machine.compiled) == 2 and not machine.left()


@pytest.mark.parametrize("damage", ["flipped", "cut", "refused"])
def test_a_damaged_entry_is_said_and_made_anew(
    damage: str, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(machine, tmp_path) as runner:
        runner.run(0, {"x": X})
    path = entry(tmp_path)
    whole = path.read_bytes()
    if damage == "refused":  # a checksum fits, and the runtime does not take it
        from trtopt.cache.checksummed import write_checksummed
        from trtopt.cache.folder import FORMATS

        write_checksummed(path, FORMATS[KERNELS], path.stem, [b"of another runtime"])
    else:
        path.write_bytes(whole[:-3] if damage == "cut" else whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    plan = next(iter(machine.plans.values()))
    with (
        caplog.at_level(logging.WARNING),
        EngineSession(machine.engine(plan), TENSORRT_RTX, RuntimeOptions(kernels=tmp_path)) as session,
    ):
        session.run({"x": X})
    assert "compiled anew" in caplog.text and len(machine.compiled) == 2
    assert path.read_bytes() == whole


def test_another_gpu_driver_runtime_or_engine_has_other_kernels(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [kernel_key(b"engine", "1.7.1.116"), kernel_key(b"other", "1.7.1.116"), kernel_key(b"engine", "1.8.0.1")]
    for other in (Probe(find_gpu("RTX 4090"), "RTX 4090", "580.1"), Probe(find_gpu("L4"), "NVIDIA L4", "590.1")):
        monkeypatch.setattr("trtopt.engine.kernel_cache.probe", lambda other=other: other)
        keys.append(kernel_key(b"engine", "1.7.1.116"))
    assert len(set(keys)) == 5


def test_a_folder_that_cannot_be_written_ends_no_run(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_bytes(b"a file where the folder goes")
    with caplog.at_level(logging.WARNING), serving(machine, tmp_path) as runner:
        np.testing.assert_array_equal(runner.run(0, {"x": X})["y"], 2 * X)
    assert "cannot be written" in caplog.text and not machine.left()


@pytest.mark.parametrize(("asked", "compiled"), [("eager", 2), ("lazy", 2), ("none", 1)])
def test_kernels_for_the_very_shapes_are_compiled_as_asked(asked: str, compiled: int, machine: Machine) -> None:
    options = RuntimeOptions(specialization=asked)  # type: ignore[arg-type]
    with EngineSession(machine.engine(doubling()), TENSORRT_RTX, options) as session:
        for x in (X, X[:1]):
            np.testing.assert_array_equal(session.run({"x": x})[0], 2 * x)
    assert machine.strategies == [asked.upper()] and len(machine.compiled) == compiled


def test_an_engine_of_tensorrt_compiles_nothing_as_it_runs(machine: Machine, tmp_path: Path) -> None:
    engine = VerifiedEngine(Path("m.engine"), b"", TENSORRT, EngineHeader("10.13.0.35", (), 0), None)
    assert runtime_options(engine, kernels=tmp_path).kernels is None
    with pytest.raises(UsageError, match="TensorRT for RTX"):
        runtime_options(engine, specialization="lazy")


def test_a_service_keeps_kernels_in_its_cache_folder(machine: Machine, tmp_path: Path) -> None:
    data = machine.engine(doubling())
    (tmp_path / "m.rtx.engine").write_bytes(data)
    with trtopt.Engine.load(
        tmp_path / "m.rtx.engine", allow_unverified=True, cache_dir=tmp_path / "cache", specialization="lazy"
    ) as engine:
        engine.run({"x": X})
    assert entry(tmp_path / "cache").stem == kernel_key(data, machine.version)
    assert set(machine.strategies) == {"LAZY"}
    with pytest.raises(UsageError, match="specialization is 'never'"):
        trtopt.Engine.load(tmp_path / "m.rtx.engine", specialization="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", ["missing", "not written"])
def test_a_runtime_without_a_cache_of_kernels_runs_engines_all_the_same(
    failure: str, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.kernel_cache = failure
    with caplog.at_level(logging.WARNING), serving(machine, tmp_path) as runner:
        np.testing.assert_array_equal(runner.run(0, {"x": X})["y"], 2 * X)
    assert "kernels" in caplog.text and not list(tmp_path.rglob("*.entry")) and not machine.left()
