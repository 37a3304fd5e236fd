"""Engines are loaded only as they were built: what is altered, mixed or for elsewhere is refused, with the reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn_cases import few_or
from engine_files import file_hash, manifest, reseal, rtx_engine, save, tensorrt_engine, tensorrt_manifest

from trtopt.engine.manifest import (
    LARGEST_ENGINE_BYTES,
    LARGEST_MANIFEST_BYTES,
    VerifiedEngine,
    check_gpu,
    check_version,
    load_engine,
    manifest_path,
    verify,
)
from trtopt.errors import IntegrityError, TargetError, UsageError
from trtopt.hardware.probe import Probe
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.manifest import DIGEST, Manifest, with_digest

DATA = rtx_engine()
HOST = b"the host's part" * 10
FIELDS = [field.name for field in dataclasses.fields(Manifest)]
posix = pytest.mark.skipif(os.name == "nt", reason="pipes and devices are POSIX's")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return save(tmp_path, DATA, manifest(DATA))


@pytest.fixture
def with_host(tmp_path: Path) -> Path:
    (tmp_path / "m.host.onnx").write_bytes(HOST)
    return save(tmp_path, DATA, manifest(DATA, file_hash("m.host.onnx", HOST)))


def refused(path: Path, words: str = ".") -> None:
    with pytest.raises(IntegrityError, match=words) as caught:
        load_engine(path, allow_unverified=True)
    assert caught.value.exit_code == 3 and caught.value.remedy and caught.value.where


def test_a_manifest_survives_a_round_trip(with_host: Path) -> None:
    found = load_engine(with_host)
    assert found.data == DATA and found.manifest is not None
    assert with_digest(found.manifest.to_json_dict()) == manifest_path(with_host).read_bytes()
    written = manifest(DATA, file_hash("m.host.onnx", HOST))
    assert dataclasses.replace(found.manifest, accuracy=None) == dataclasses.replace(written, accuracy=None)
    assert verify(with_host).engine_sha256 == written.engine_sha256
    assert found.built == "tensorrt-rtx 1.7.1.116 for compute capability 8.9 (L4)"


def test_engine_and_manifest_may_be_renamed_together(engine: Path) -> None:
    engine.rename(engine.with_name("other.engine"))
    manifest_path(engine).rename(manifest_path(engine.with_name("other.engine")))
    assert load_engine(engine.with_name("other.engine")).data == DATA


@pytest.mark.parametrize("flips", few_or(1000))
@pytest.mark.parametrize("of", ["engine", "manifest", "host"])
def test_a_bit_flipped_anywhere_is_noticed(with_host: Path, of: str, flips: int) -> None:
    """At seeded random places: of the engine, header included, of its manifest, and of the part for the host."""
    places = {"engine": with_host, "manifest": manifest_path(with_host), "host": with_host.with_name("m.host.onnx")}
    content, dice = places[of].read_bytes(), random.Random(5)
    for _ in range(flips):
        changed = bytearray(content)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        places[of].write_bytes(changed)
        refused(with_host)
    places[of].write_bytes(content)
    load_engine(with_host)


@pytest.mark.parametrize("name", [*FIELDS, DIGEST])
def test_a_field_altered_by_hand_is_noticed(with_host: Path, name: str) -> None:
    place = manifest_path(with_host)
    values: tuple[Any, ...] = ("x", None, 7, [], {})
    for value in values:
        fields = json.loads(place.read_bytes())
        if fields[name] != value:
            place.write_text(json.dumps({**fields, name: value}, indent=1) + "\n")
            refused(with_host)
            place.write_bytes(with_digest({key: item for key, item in fields.items() if key != DIGEST}))
    load_engine(with_host)


@pytest.mark.parametrize(
    "change",
    [
        {"engine_sha256": "00" * 32},
        {"engine_bytes": len(DATA) - 1},
        {"engine_bytes": -1},
        {"engine_bytes": 1 << 70},
        {"backend": "tensorrt"},
        {"backend_version": "1.7.2.0"},
        {"backend_version": ""},
        {"backend_version": "1"},
        {"backend_version": "1.7"},
        {"backend_version": "1.7.1.11"},
        {"compute_capabilities": ["8.9", "12.0"]},
        {"compute_capabilities": []},
        {"schema": "trtopt.manifest/2"},
        {"gpu": 4},
        {"precision": []},
        {"host": {"files": [{"name": "x"}], "inputs": [], "outputs": []}},
        {"accuracy": {"outputs": {"y": 3}}},
        {"hardware_compatibility": "any"},
    ],
    ids=str,
)
def test_a_manifest_written_for_an_engine_it_does_not_fit_is_refused(engine: Path, change: dict[str, Any]) -> None:
    reseal(engine, **change)
    refused(engine)


def test_a_field_of_a_later_version_is_passed_over(engine: Path) -> None:
    before = verify(engine)
    reseal(engine, of_tomorrow=[1.5, {"a": None}])
    assert verify(engine) == before


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:40], lambda d: b"", bytes.swapcase]
)
def test_an_engine_cut_off_extended_or_replaced_says_what_it_should_be(
    engine: Path, change: Callable[[bytes], bytes]
) -> None:
    engine.write_bytes(change(DATA))
    refused(engine, r"built by tensorrt-rtx 1\.7\.1\.116 for compute capability 8\.9 \(L4\)")


def test_a_header_that_says_otherwise_than_a_fitting_manifest_is_refused(tmp_path: Path) -> None:
    other = rtx_engine(targets=16)
    refused(save(tmp_path, other, manifest(other)), r"compute capability 12\.0; its manifest says .* 8\.9 \(L4\)")
    for data in (b"MZ" * 100, rtx_engine()[:-1]):
        refused(save(tmp_path, data, manifest(data)), "no engine")


def test_the_manifest_of_another_engine_is_refused(tmp_path: Path) -> None:
    paths = []
    for seed in (1, 2):
        (folder := tmp_path / str(seed)).mkdir()
        paths.append(save(folder, rtx_engine(seed=seed), manifest(rtx_engine(seed=seed))))
    first, second = map(manifest_path, paths)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for path in paths:
        refused(path, "not the one that its manifest describes")


def test_of_two_builds_only_what_belongs_together_is_accepted(tmp_path: Path) -> None:
    """Every mixture that a build killed over an older one could leave."""
    names = ("m.host.onnx", "m.engine", "m.engine.manifest.json")
    builds = []
    for seed in (1, 2):
        data, host = rtx_engine(seed=seed), HOST + bytes([seed])
        (tmp_path / names[0]).write_bytes(host)
        save(tmp_path, data, manifest(data, file_hash(names[0], host)))
        builds.append([(tmp_path / name).read_bytes() for name in names])
    for choice in itertools.product((0, 1), repeat=3):
        for name, contents in zip(names, zip(*builds, strict=True), strict=True):
            (tmp_path / name).write_bytes(contents[choice[names.index(name)]])
        if len(set(choice)) == 1:
            load_engine(tmp_path / names[1])
        else:
            refused(tmp_path / names[1])


def test_a_part_for_the_host_that_is_missing_or_another_is_refused(with_host: Path) -> None:
    place = with_host.with_name("m.host.onnx")
    for content in (b"", HOST[:-1], HOST + b"\0", HOST[::-1]):
        place.write_bytes(content)
        refused(with_host, "not the one that belongs to the engine")
    place.unlink()
    refused(with_host, "cannot be read: No such file")


@pytest.mark.parametrize(
    "name",
    [
        "../m.host.onnx",
        "/etc/passwd",
        "a/b.onnx",
        "..",
        ".",
        "",
        "a\\b",
        "C:\\x",
        "\\\\s\\x",
        "a\0b",
        "\ud800",
        "x" * 400,
    ],
)
def test_a_file_that_is_not_beside_the_engine_is_not_opened(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "engine").mkdir()
    (tmp_path / "m.host.onnx").write_bytes(HOST)
    refused(save(folder, DATA, manifest(DATA, file_hash(name, HOST))), "not beside the engine|cannot be read|no text")


@posix
def test_a_link_is_judged_by_what_it_leads_to(with_host: Path) -> None:
    place = with_host.with_name("m.host.onnx")
    (elsewhere := with_host.parent / "elsewhere").mkdir()
    place.rename(elsewhere / "part")
    place.symlink_to(elsewhere / "part")
    load_engine(with_host)
    (elsewhere / "part").write_bytes(HOST[::-1])
    refused(with_host)
    place.unlink()
    place.symlink_to("/dev/zero")
    refused(with_host, "is not a file")


def test_without_a_manifest_an_engine_is_refused_unless_that_is_allowed(engine: Path) -> None:
    manifest_path(engine).unlink()
    for load in (load_engine, verify):
        with pytest.raises(UsageError, match="has no manifest") as caught:
            load(engine)
        assert caught.value.exit_code == 2 and "trtopt build" in caught.value.remedy
    found = load_engine(engine, allow_unverified=True)
    assert found.manifest is None and found.data == DATA
    assert found.built == "tensorrt-rtx 1.7.1.116 for compute capability 8.9"


def test_what_is_no_engine_is_refused_without_a_manifest_too(tmp_path: Path) -> None:
    for content in (b"", b"\x08\x0aonnx" * 20, DATA[:-1]):
        (tmp_path / "m.engine").write_bytes(content)
        with pytest.raises(UsageError):
            load_engine(tmp_path / "m.engine", allow_unverified=True)


@pytest.mark.parametrize("missing", ["engine", "folder"])
def test_an_engine_that_cannot_be_read_is_a_usage_error(tmp_path: Path, missing: str) -> None:
    path = save(tmp_path, DATA, manifest(DATA))
    path.unlink()
    if missing == "folder":
        path.mkdir()
    with pytest.raises(UsageError):
        load_engine(path)


@posix
@pytest.mark.parametrize("which", ["m.engine", "m.engine.manifest.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, which: str) -> None:
    save(tmp_path, DATA, manifest(DATA))
    (tmp_path / which).unlink()
    os.mkfifo(tmp_path / which)
    with pytest.raises(UsageError, match="is not a file"):
        load_engine(tmp_path / "m.engine")


@posix
@pytest.mark.parametrize(
    ("which", "size"), [("m.engine", LARGEST_ENGINE_BYTES + 1), ("m.engine.manifest.json", LARGEST_MANIFEST_BYTES + 1)]
)
def test_a_file_too_large_is_not_read(tmp_path: Path, which: str, size: int) -> None:
    save(tmp_path, DATA, manifest(DATA))
    os.truncate(tmp_path / which, size)
    with pytest.raises(UsageError, match=str(size)):
        load_engine(tmp_path / "m.engine")


@posix
def test_an_engine_of_another_size_is_not_read(tmp_path: Path) -> None:
    """200 GB that take no room on the disk."""
    path = save(tmp_path, DATA, manifest(DATA))
    os.truncate(path, 200 << 30)
    refused(path, "not the one that its manifest describes")


def test_a_folder_is_no_engine(tmp_path: Path) -> None:
    for path in (".", "", "..", "/", tmp_path):
        with pytest.raises(UsageError):
            verify(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"1" * 9000,
        b'{"a":"\xed"}',
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_is_no_manifest_is_refused(engine: Path, content: bytes) -> None:
    manifest_path(engine).write_bytes(content)
    refused(engine, "not as it was written")


ADA = Probe(find_gpu("RTX-4090"), "NVIDIA GeForce RTX 4090", "555.42")
AMPERE = Probe(find_gpu("A100-SXM4-80GB"), "NVIDIA A100-SXM4-80GB", "535.1")
HOPPER = Probe(find_gpu("H100-SXM5-80GB"), "NVIDIA H100 80GB HBM3", "535.1")
TURING = Probe(find_gpu("T4"), "Tesla T4", "535.1")
NONE = Probe(None, reason="nvidia-smi is not on the path: no NVIDIA driver")

Loaded = Callable[..., VerifiedEngine]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """Loads an engine with a manifest; ``targets`` alone makes one of TensorRT for RTX, without a manifest."""

    def load(targets: int | None = None, **changes: Any) -> VerifiedEngine:
        path = tmp_path / "m.engine"
        if targets is not None:
            path.write_bytes(rtx_engine(targets=targets))
            return load_engine(path, allow_unverified=True)
        data = tensorrt_engine()
        return load_engine(save(tmp_path, data, tensorrt_manifest(data, **changes)))

    return load


def test_an_engine_for_this_gpu_passes(loaded: Loaded) -> None:
    check_gpu(loaded(targets=2 | 8), ADA)
    check_gpu(loaded(), AMPERE)
    check_gpu(loaded(hardware_compatibility="same_compute_capability"), AMPERE)


@pytest.mark.parametrize(
    ("made", "here", "said"),
    [
        ({"targets": 10}, HOPPER, ["tensorrt-rtx 1.7.1.116", "8.0, 8.9", HOPPER.name, "compute capability 9.0"]),
        ({"targets": 10}, NONE, ["8.0, 8.9", NONE.reason, "--backend onnxruntime", "--layer-info"]),
        ({}, NONE, ["tensorrt 10.3.0.26", NONE.reason, "--backend onnxruntime", "--layer-info"]),
        ({}, HOPPER, ["tensorrt 10.3.0.26 for compute capability 8.0 (A100)", HOPPER.name, "compute capability 9.0"]),
        ({"hardware_compatibility": "ampere+"}, TURING, ["compute capability 8.0 (A100)", "compute capability 7.5"]),
    ],
)
def test_an_engine_for_elsewhere_says_what_it_is_for_and_what_is_here(
    loaded: Loaded, made: dict[str, Any], here: Probe, said: list[str]
) -> None:
    with pytest.raises(TargetError) as caught:
        check_gpu(loaded(**made), here)
    assert caught.value.exit_code == 4
    assert [part for part in said if part not in str(caught.value)] == []


def test_an_engine_compatible_with_ampere_and_later_runs_there(loaded: Loaded) -> None:
    for here in (AMPERE, ADA, HOPPER):
        check_gpu(loaded(hardware_compatibility="ampere+"), here)


def test_the_header_of_an_engine_for_rtx_says_where_it_runs_whatever_its_manifest_says(engine: Path) -> None:
    reseal(engine, hardware_compatibility="ampere+")
    check_gpu(load_engine(engine), ADA)
    with pytest.raises(TargetError, match="compute capability 9"):
        check_gpu(load_engine(engine), HOPPER)


def test_an_engine_of_another_release_names_both(loaded: Loaded) -> None:
    check_version(loaded(targets=8), "1.7.1.120")
    with pytest.raises(TargetError, match=r"1\.7\.1\.116 for .*; installed is tensorrt-rtx 1\.8\.0\.3"):
        check_version(loaded(targets=8), "1.8.0.3")
    with pytest.raises(TargetError, match=r"10\.3\.0\.26 for .*; installed is tensorrt 10\.16\.1\.11"):
        check_version(loaded(), "10.16.1.11")


def test_tensorrt_judges_versions_itself_where_an_engine_may_be_for_later_ones(loaded: Loaded, tmp_path: Path) -> None:
    check_version(loaded(version_compatible=True), "10.16.1.11")
    manifest_path(tmp_path / "m.engine").unlink()
    check_version(load_engine(tmp_path / "m.engine", allow_unverified=True), "10.16.1.11")
