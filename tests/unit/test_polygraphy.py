"""Polygraphy's files without Polygraphy: what is read, what is written, what is refused."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe.polygraphy import read_inputs, read_outputs, write_inputs, write_outputs
from trtopt.precision.observe.samples import open_samples

IMAGE = (InputSpec("image", np.dtype(np.float32), ("N", 3)),)


def encoded(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def rows(count: int, first: float = 0.0) -> np.ndarray:
    return np.arange(first, first + 3 * count, dtype=np.float32).reshape(count, 3)


def saved(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def refused(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_inputs(path)
    assert caught.value.where and caught.value.remedy
    return caught.value


def test_saved_inputs_are_samples(tmp_path: Path) -> None:
    path = saved(tmp_path / "inputs.json", [{"image": encoded(rows(2))}, {"image": encoded(rows(1, 6))}])
    samples = open_samples(str(path), IMAGE)
    assert samples.count == 3 and samples.source == "user"
    assert [sample["image"].tolist() for sample in samples] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]
    assert [sample["image"].shape for sample in samples.undivided()] == [(2, 3), (1, 3)]


def test_a_single_feed_is_read_as_polygraphy_reads_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "inputs.json", {"image": encoded(rows(1))})
    assert len(read_inputs(path)) == 1


def test_a_folder_of_iterations_is_read_in_order(tmp_path: Path) -> None:
    for index in range(12):
        saved(tmp_path / f"{index:010}.json", {"image": encoded(rows(1, index))})
    assert [sample["image"][0, 0] for sample in open_samples(tmp_path, IMAGE)] == list(range(12))


def test_json_beside_arrays_is_not_taken_for_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", rows(2))
    saved(tmp_path / "classes.json", ["cat", "dog"])
    assert open_samples(tmp_path, IMAGE).count == 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([{"image": {"tensor": "gASV", "polygraphy_class": "Tensor"}}], "arrays of NumPy"),
        ([{"image": [1.0, 2.0]}], "arrays of NumPy"),
        ([{"image": {"array": "no base64!"}}], "base64"),
        (["image"], "dict"),
        (7, "dict"),
    ],
)
def test_other_json_is_refused(data: Any, why: str, tmp_path: Path) -> None:
    assert why in refused(saved(tmp_path / "inputs.json", data)).what


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_bytes(b"\x80\x04]\x94.")
    assert "JSON" in refused(path).what


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harm",)

    stream = io.BytesIO()
    np.save(stream, np.array([Harm()], dtype=object), allow_pickle=True)
    for content in (stream.getvalue(), pickle.dumps(Harm())):
        text = base64.b64encode(content).decode()
        refused(saved(tmp_path / "inputs.json", [{"image": {"array": text, "polygraphy_class": "ndarray"}}]))
    assert not (tmp_path / "harm").exists()


def test_a_header_that_promises_more_than_there_is_allocates_nothing(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    text = base64.b64encode(stream.getvalue()).decode()
    assert "bytes" in refused(saved(tmp_path / "inputs.json", [{"image": {"array": text}}])).what


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3.0).reshape(()),
        np.zeros((0, 4), np.int64),
        np.asfortranarray(rows(2)),
        np.array([True, False]),
        rows(2).astype(np.float16),
    ],
    ids=["scalar", "empty", "fortran", "bool", "half"],
)
def test_what_is_written_is_read(array: np.ndarray, tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs.json", iter([{"x": array}, {"x": array}]))
    found = read_inputs(tmp_path / "inputs.json")
    assert len(found) == 2
    assert found[1]["x"].dtype == array.dtype and found[1]["x"].shape == array.shape
    assert np.array_equal(found[1]["x"], array)


def test_outputs_are_written_and_read_with_their_runner(tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    write_outputs(path, "trtopt-engine", iter([{"y": rows(1)}, {"y": rows(1, 5).astype(ml_dtypes.bfloat16)}]))
    runner, found = read_outputs(path)
    assert runner == "trtopt-engine"
    assert found[1]["y"].dtype == np.float32 and found[1]["y"].tolist() == [[5, 6, 7]]


def test_outputs_of_two_runners_are_no_reference(tmp_path: Path) -> None:
    for runner in ("a", "b"):
        write_outputs(tmp_path / f"{runner}.json", runner, [{"y": rows(1)}])
    with pytest.raises(UsageError, match="2 runners"):
        read_outputs(tmp_path)


def test_inputs_are_no_outputs(tmp_path: Path) -> None:
    write_inputs(tmp_path / "inputs.json", [{"x": rows(1)}])
    with pytest.raises(UsageError, match="no outputs"):
        read_outputs(tmp_path / "inputs.json")


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    def feeds() -> Any:
        yield {"x": rows(1)}
        raise UsageError("the samples end badly")

    with pytest.raises(UsageError):
        write_inputs(tmp_path / "inputs.json", feeds())
    assert not list(tmp_path.iterdir())


LOADER = """
import numpy as np

def load_data():
    for index in range(3):
        yield {"image": np.full((1, 3), index, np.float32)}

batches = [{"image": np.full((1, 3), index, np.float32)} for index in range(4)]
stream = ({"image": np.full((1, 3), index, np.float32)} for index in range(5))
"""


@pytest.mark.parametrize(("name", "count"), [("", 3), (":load_data", 3), (":batches", 4), (":stream", 5)])
def test_a_data_loader_script_can_be_read_again(name: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER)
    samples = open_samples(f"{tmp_path / 'loader.py'}{name}", IMAGE)
    for _ in range(2):
        assert [sample["image"][0, 0] for sample in samples] == list(range(count))


def test_a_script_without_load_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text("def batches():\n    return []\n")
    with pytest.raises(UsageError, match="load_data") as caught:
        list(open_samples(tmp_path / "loader.py", IMAGE))
    assert "batches" in caught.value.remedy
