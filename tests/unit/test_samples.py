"""Samples: formats, splitting rules, and every way in which they can be wrong."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe import feeds
from trtopt.precision.observe.samples import SYNTHETIC_COUNT, open_samples, unseen_samples
from trtopt.precision.observe.stream import Samples

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
IMAGE = (InputSpec("image", F32, ("N", 3, 4, 4)),)
STATIC = (
    InputSpec(
        "image",
        F32,
        (2, 3),
    ),
)
RECURRENT = (
    InputSpec("input", F32, ("batch", 8)),
    InputSpec("state", F32, (2, "batch", 5)),
    InputSpec("rate", I64, ()),
)
TEXT = (InputSpec("ids", I64, ("batch", "sequence")), InputSpec("mask", I64, ("batch", "sequence")))
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def refused(src: Any, inputs: tuple[InputSpec, ...] = IMAGE) -> UsageError:
    with pytest.raises(UsageError) as caught:
        list(open_samples(src, inputs))
    assert caught.value.exit_code == 2
    assert caught.value.where
    assert caught.value.remedy
    return caught.value


def shapes_of(samples: Samples) -> list[dict[str, tuple[int, ...]]]:
    found = [{name: array.shape for name, array in sample.items()} for sample in samples]
    assert list(samples.shapes()) == found
    assert samples.count in (None, len(found))
    return found


def test_an_npz_is_split_into_single_samples_and_can_be_read_again(tmp_path: Path) -> None:
    images = floats(5, 3, 4, 4)
    np.savez(tmp_path / "s.npz", image=images)
    samples = open_samples(str(tmp_path / "s.npz"), IMAGE)
    assert samples.count == 5
    assert samples.source == "user"
    for _ in range(2):
        read = [sample["image"] for sample in samples]
        assert all(array.shape == (1, 3, 4, 4) and array.dtype == F32 for array in read)
        assert np.array_equal(np.concatenate(read), images)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_compressed_members_and_column_major_arrays_read_the_same(
    tmp_path: Path, save: Callable[..., None], order: str
) -> None:
    images = floats(5, 3, 4, 4)
    save(tmp_path / "s.npz", image=np.asarray(images, order=order))
    assert np.array_equal(np.concatenate([s["image"] for s in open_samples(tmp_path / "s.npz", IMAGE)]), images)


def test_an_npy_serves_a_model_with_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", floats(4, 3, 4, 4))
    assert len(shapes_of(open_samples(tmp_path / "s.npy", IMAGE))) == 4
    assert "2 inputs" in refused(tmp_path / "s.npy", TEXT).what


def test_a_folder_is_read_in_the_order_of_the_names(tmp_path: Path) -> None:
    for name, value in (("b", 2), ("a", 1), ("c", 3)):
        np.savez(tmp_path / f"{name}.npz", image=np.full((1, 3, 4, 4), value, np.float32))
    (tmp_path / "notes.txt").write_text("not a sample")
    assert [sample["image"].max() for sample in open_samples(str(tmp_path), IMAGE)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "split"),
    [((6, 3), [(2, 3)] * 3), ((2, 3), [(2, 3)]), ((4, 2, 3), [(2, 3)] * 4)],
    ids=["rows", "one sample", "indexed"],
)
def test_a_static_first_dimension_is_kept(shape: tuple[int, ...], split: list[tuple[int, ...]]) -> None:
    array = floats(*shape)
    samples = open_samples({"image": array}, STATIC)
    assert [one["image"] for one in shapes_of(samples)] == split
    assert np.array_equal(np.concatenate([s["image"] for s in samples]), array.reshape(-1, 3))


def test_an_extra_axis_counts_samples_of_a_dynamic_batch() -> None:
    found = shapes_of(open_samples({"ids": np.zeros((3, 1, 7), np.int64), "mask": np.ones((3, 1, 7), np.int64)}, TEXT))
    assert found == [{"ids": (1, 7), "mask": (1, 7)}] * 3


def test_a_recurrent_state_and_a_scalar_make_one_complete_feed() -> None:
    feed = {"input": floats(1, 8), "state": floats(2, 1, 5), "rate": np.array(16000)}
    assert shapes_of(open_samples(feed, RECURRENT)) == [{"input": (1, 8), "state": (2, 1, 5), "rate": ()}]
    batch = {"input": floats(4, 8), "state": floats(2, 4, 5), "rate": np.array(16000)}
    assert shapes_of(open_samples(batch, RECURRENT)) == [{"input": (4, 8), "state": (2, 4, 5), "rate": ()}]


def test_stacked_states_split_and_a_scalar_is_shared_by_all_samples() -> None:
    feed = {"input": floats(3, 8), "state": floats(3, 2, 1, 5), "rate": np.array(8000)}
    samples = open_samples(feed, RECURRENT)
    assert shapes_of(samples) == [{"input": (1, 8), "state": (2, 1, 5), "rate": ()}] * 3
    assert [int(sample["rate"]) for sample in samples] == [8000] * 3
    stacked = open_samples({**feed, "rate": np.arange(3)}, RECURRENT)
    assert [int(sample["rate"]) for sample in stacked] == [0, 1, 2]


def test_equally_named_dimensions_must_agree() -> None:
    error = refused({"ids": np.zeros((2, 7), np.int64), "mask": np.ones((2, 6), np.int64)}, TEXT)
    assert "sequence" in error.what
    error = refused({"input": floats(4, 8), "state": floats(2, 1, 5), "rate": np.array(1)}, RECURRENT)
    assert "batch" in error.what


def test_inputs_that_disagree_on_the_number_of_samples_are_refused() -> None:
    error = refused({"ids": np.zeros((2, 1, 7), np.int64), "mask": np.ones((3, 1, 7), np.int64)}, TEXT)
    assert "ids: 2, mask: 3" in error.what


def test_dtypes_of_the_same_kind_are_converted() -> None:
    sample = next(iter(open_samples({"image": RNG.standard_normal((1, 3, 4, 4))}, IMAGE)))
    assert sample["image"].dtype == F32
    small = {"ids": np.array([[1, 2]], np.uint8), "mask": np.array([[1, 1]], np.int32)}
    assert {array.dtype for array in next(iter(open_samples(small, TEXT))).values()} == {I64}
    wide = (InputSpec("image", np.dtype(ml_dtypes.bfloat16), ("N", 2)),)
    assert next(iter(open_samples({"image": floats(1, 2)}, wide)))["image"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("array", "inputs"),
    [
        (np.zeros((1, 3, 4, 4), np.uint8), IMAGE),
        (np.zeros((1, 3, 4, 4), bool), IMAGE),
        (np.zeros((1, 3, 4, 4), "U3"), IMAGE),
        (np.zeros((1, 2), np.float32), (InputSpec("image", I64, ("N", 2)),)),
    ],
    ids=["uint8 image", "bool", "text", "float ids"],
)
def test_dtypes_of_another_kind_are_refused(array: np.ndarray, inputs: tuple[InputSpec, ...]) -> None:
    assert str(array.dtype) in refused({"image": array}, inputs).what


def test_integers_that_do_not_fit_are_refused() -> None:
    narrow = (InputSpec("image", np.dtype(np.int32), ("N", 1)),)
    assert "int32" in refused({"image": np.array([[1 << 40]])}, narrow).what


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_their_sample(value: float) -> None:
    images = floats(3, 3, 4, 4)
    images[2, 0, 1, 1] = value
    error = refused({"image": images})
    assert "NaN or infinity" in error.what
    assert "sample 2" in error.where


def test_a_float_that_overflows_the_input_is_refused() -> None:
    half = (InputSpec("image", np.dtype(np.float16), ("N", 1)),)
    assert "float16" in refused({"image": np.array([[1e6]], np.float32)}, half).what


def test_a_wrong_name_gets_the_nearest_one() -> None:
    error = refused({"imgae": floats(1, 3, 4, 4)})
    assert "'imgae'" in error.what
    assert "did you mean 'image'" in error.remedy


def test_a_missing_input_is_named() -> None:
    assert "'mask'" in refused({"ids": np.zeros((1, 7), np.int64)}, TEXT).what


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 3, 4, 5), (1, 4), (2, 1, 3, 4, 5), ()])
def test_a_wrong_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    error = refused({"image": np.zeros(shape, np.float32)})
    assert "[N, 3, 4, 4]" in error.what


def test_a_batch_that_is_no_multiple_of_the_static_one_is_refused() -> None:
    assert "[2, 3]" in refused({"image": floats(5, 3)}, STATIC).what


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (0, 1, 3, 4, 4)])
def test_zero_samples_are_refused(shape: tuple[int, ...]) -> None:
    assert "no samples" in refused({"image": np.zeros(shape, np.float32)}).what


def test_missing_empty_and_foreign_sources_are_refused(tmp_path: Path) -> None:
    assert "do not exist" in refused(str(tmp_path / "none.npz")).what
    (tmp_path / "folder").mkdir()
    assert "no .npz, .npy or .json" in refused(tmp_path / "folder").what
    (tmp_path / "empty.npz").touch()
    assert "empty" in refused(tmp_path / "empty.npz").what
    (tmp_path / "text.npz").write_text("hello")
    assert "cannot be read" in refused(tmp_path / "text.npz").what
    (tmp_path / "text.npy").write_text("hello, world")
    assert "cannot be read" in refused(tmp_path / "text.npy").what
    (tmp_path / "s.csv").write_text("1,2")
    assert "no known format" in refused(tmp_path / "s.csv").what
    np.savez(tmp_path / "nothing.npz")
    assert "lack" in refused(tmp_path / "nothing.npz").what


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str, keep: float) -> None:
    path = tmp_path / f"s.{kind}"
    (np.save if kind == "npy" else np.savez_compressed)(
        path, **{"arr" if kind == "npy" else "image": floats(5, 3, 4, 4)}
    )
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    refused(path)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, image=floats(50, 3, 4, 4))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "cannot be read" in refused(path).what


class _Payload:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["npz", "npy", "raw"])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    trap = tmp_path / "ran"
    array = np.array([_Payload(trap)], dtype=object)
    path = tmp_path / ("s.npy" if kind == "npy" else "s.npz")
    if kind == "npz":
        np.savez(path, image=array)
    elif kind == "npy":
        np.save(path, array)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("image.npy", pickle.dumps(_Payload(trap)))
    error = refused(path)
    assert not trap.exists()
    if kind != "raw":
        assert "pickle" in error.what


def test_a_header_that_promises_more_than_the_file_holds_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 3, 4, 4)})
    (tmp_path / "s.npy").write_bytes(header.getvalue() + bytes(64))
    assert "cut short" in refused(tmp_path / "s.npy").what
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive:
        archive.writestr("image.npy", header.getvalue() + bytes(64))
    assert "cut short" in refused(tmp_path / "s.npz").what


def test_rows_larger_than_any_sample_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "s.npz", image=floats(5, 3, 4, 4))
    monkeypatch.setattr(feeds, "MAX_SAMPLE_BYTES", 100)
    assert "192 bytes" in refused(tmp_path / "s.npz").what


def test_labels_come_with_the_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=floats(3, 3, 4, 4), __labels__=np.array([5, 6, 7]))
    np.savez(tmp_path / "b.npz", image=floats(1, 3, 4, 4), __labels__=np.array([8]))
    labels = open_samples(tmp_path, IMAGE).labels
    assert labels is not None
    assert labels.tolist() == [5, 6, 7, 8]
    per_row = open_samples({"image": floats(6, 3), "__labels__": np.arange(6)}, STATIC).labels
    assert per_row is not None
    assert per_row.tolist() == [[0, 1], [2, 3], [4, 5]]
    feeds = [{"image": floats(1, 3, 4, 4), "__labels__": np.array([n])} for n in range(3)]
    streamed = open_samples(feeds, IMAGE).labels
    assert streamed is not None
    assert streamed.tolist() == [0, 1, 2]
    assert open_samples({"image": floats(1, 3, 4, 4)}, IMAGE).labels is None


def test_labels_that_do_not_match_the_samples_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", image=floats(3, 3, 4, 4), label=np.arange(3))
    assert "labels: __labels__" in refused(tmp_path / "b.npz").remedy
    assert "2 labels for 3 samples" in refused({"image": floats(3, 3, 4, 4), "__labels__": np.arange(2)}).what
    np.savez(tmp_path / "a.npz", image=floats(3, 3, 4, 4), __labels__=np.arange(3))
    np.savez(tmp_path / "b.npz", image=floats(1, 3, 4, 4))
    with pytest.raises(UsageError, match="1 of 2 files"):
        _ = open_samples(tmp_path, IMAGE).labels


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "data.py"
    path.write_text("import numpy as np\n" + body)
    return f"{path}:feeds"


def test_a_script_yields_feeds(tmp_path: Path) -> None:
    src = script(
        tmp_path,
        "def feeds():\n    for n in range(1, 4):\n        yield {'image': np.full((n, 3, 4, 4), n, np.float32)}\n",
    )
    samples = open_samples(src, IMAGE)
    assert samples.count == 6
    assert [sample["image"].max() for sample in samples] == [1, 2, 2, 3, 3, 3]
    assert len(shapes_of(samples)) == 6
    first = samples.sha256
    assert open_samples(src, IMAGE).sha256 == first
    script(tmp_path, "def feeds():\n    return [{'image': np.zeros((1, 3, 4, 4), np.float32)}]\n")
    assert open_samples(src, IMAGE).sha256 != first


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def feed(): pass\n", "no function or iterable 'feeds'"),
        ("_LIST, images, other = [], [{}], (item for item in [])\n", "it has: images, other"),
        ("def feeds():\n    raise ValueError('broken loader')\n", "broken loader"),
        ("def feeds():\n    yield {'image': np.zeros((1, 3, 4, 4), np.float32)}\n    1 / 0\n", "ZeroDivisionError"),
        ("def feeds(:\n", "SyntaxError"),
        ("def feeds(count): return []\n", "TypeError"),
        ("def feeds(): return []\n", "no samples"),
        ("def feeds(): return 3\n", "TypeError"),
        ("def feeds(): yield 'image'\n", "the samples are <U5"),
        ("def feeds(): yield object()\n", "not an array"),
        ("feeds = 3\n", "not iterable"),
        ("def feeds(): yield {'image': [[1], [1, 2]]}\n", "not an array"),
    ],
)
def test_a_failing_script_is_a_usage_error(tmp_path: Path, body: str, message: str) -> None:
    assert message in str(refused(script(tmp_path, body)))


def test_a_missing_script_is_a_usage_error(tmp_path: Path) -> None:
    assert "script does not exist" in refused(f"{tmp_path}/none.py:feeds").what


def test_lists_functions_and_generators_are_read_again() -> None:
    feeds = [{"image": floats(1, 3, 4, 4)} for _ in range(3)]
    for src in (feeds, lambda: iter(feeds), (feed for feed in feeds)):
        samples = open_samples(src, IMAGE)
        assert len(list(samples)) == len(list(samples)) == 3
        assert open_samples(samples, IMAGE) is samples
    assert "no samples" in refused([]).what
    assert "not iterable" in refused(3).what


def test_the_hash_follows_the_data_and_not_the_form(tmp_path: Path) -> None:
    one, other = floats(2, 3, 4, 4), floats(2, 3, 4, 4)
    for open_one in (
        lambda array: open_samples({"image": array}, IMAGE),
        lambda array: open_samples([{"image": array}], IMAGE),
    ):
        assert open_one(one).sha256 == open_one(one.copy()).sha256 != open_one(other).sha256
    np.savez(tmp_path / "s.npz", image=one)
    first = open_samples(tmp_path / "s.npz", IMAGE).sha256
    np.savez(tmp_path / "s.npz", image=other)
    assert open_samples(tmp_path / "s.npz", IMAGE).sha256 != first


def test_synthetic_samples_are_seeded_and_typed() -> None:
    inputs = (*IMAGE, InputSpec("ids", I64, ("N", 6)), InputSpec("flag", np.dtype(bool), ()))
    samples = open_samples("synthetic", inputs)
    assert samples.source == "synthetic"
    assert samples.count == SYNTHETIC_COUNT == len(shapes_of(samples))
    first = next(iter(samples))
    assert first["image"].shape == (1, 3, 4, 4)
    assert set(np.unique(first["ids"])) <= {0, 1}
    assert first["flag"].dtype == bool
    again = next(iter(open_samples("synthetic", inputs, count=3)))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert samples.sha256 == open_samples("synthetic", inputs).sha256
    assert samples.sha256 != open_samples("synthetic", inputs, count=3).sha256
    images = [sample["image"] for sample in samples]
    assert not np.array_equal(images[0], images[1])
    others = unseen_samples(inputs, shapes={})
    assert others.count == samples.count and others.sha256 != samples.sha256
    assert not {image.tobytes() for image in images} & {sample["image"].tobytes() for sample in others}


def test_synthetic_samples_take_dynamic_dimensions_from_the_caller() -> None:
    with pytest.raises(UsageError, match="'sequence'") as caught:
        open_samples("synthetic", TEXT)
    assert "--opt-shapes" in caught.value.remedy
    found = shapes_of(open_samples("synthetic", TEXT, shapes={"ids": (8, 12)}))
    assert found == [{"ids": (1, 12), "mask": (1, 12)}] * SYNTHETIC_COUNT
    with pytest.raises(UsageError, match="not"):
        open_samples("synthetic", IMAGE, shapes={"image": (1, 3, 4)})
    with pytest.raises(UsageError, match="not"):
        open_samples("synthetic", IMAGE, shapes={"image": (1, 4, 4, 4)})
    assert shapes_of(open_samples("synthetic", RECURRENT))[0] == {"input": (1, 8), "state": (2, 1, 5), "rate": ()}


def test_an_array_alone_is_for_a_model_with_one_input() -> None:
    images = floats(5, 3, 4, 4)
    alone, named = open_samples(images, IMAGE), open_samples({"image": images}, IMAGE)
    assert alone.count == 5 and alone.sha256 == named.sha256
    for left, right in zip(alone, named, strict=True):
        np.testing.assert_array_equal(left["image"], right["image"])
    error = refused(images, TEXT)
    assert "the model has 2 inputs" in error.what and "ids, mask" in error.remedy


def test_the_name_of_a_file_is_not_in_the_hash_and_those_in_a_folder_are(tmp_path: Path) -> None:
    for folder, files in {"a": ("1.npz", "2.npz"), "b": ("2.npz", "1.npz"), "c": ("1.npz", "3.npz")}.items():
        (tmp_path / folder).mkdir()
        for value, name in enumerate(files):
            np.savez(tmp_path / folder / name, image=np.full((1, 3, 4, 4), value, np.float32))
    names = ("a", "b", "c", "a/1.npz", "b/2.npz", "b/1.npz")
    of = {name: open_samples(tmp_path / name, IMAGE).sha256 for name in names}
    assert of["a/1.npz"] == of["b/2.npz"] != of["b/1.npz"]
    assert len({of["a"], of["b"], of["c"]}) == 3


def test_synthetic_samples_beyond_any_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="would hold 36893488147419103232 numbers") as caught:
        open_samples("synthetic", [InputSpec("x", np.dtype("float32"), (8, 1 << 62))])
    assert "--opt-shapes" in caught.value.remedy
