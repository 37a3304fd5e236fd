"""Samples from whatever can be iterated: pairs with labels, bare arrays, tensors, loaders, data sets, generators."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.precision.observe import loaders
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.stream import Samples

IMAGE = (InputSpec("image", np.dtype(np.float32), ("N", 3, 4, 4)),)
TEXT = tuple(InputSpec(name, np.dtype(np.int64), ("N", "T")) for name in ("ids", "mask"))
RNG = np.random.default_rng(0)


def images(count: int) -> np.ndarray:
    return RNG.standard_normal((count, 3, 4, 4)).astype(np.float32)


def values(samples: Samples) -> np.ndarray:
    return np.concatenate([sample["image"] for sample in samples])


BATCHES, LABELS = [images(2), images(2), images(1)], [np.array([0, 1]), np.array([2, 3]), np.array([4])]
ALL = np.concatenate(BATCHES)


@pytest.mark.parametrize("pair", [tuple, list])
def test_the_first_of_a_pair_is_the_input_and_the_second_the_labels(pair: type) -> None:
    samples = open_samples([pair(item) for item in zip(BATCHES, LABELS, strict=True)], IMAGE)
    np.testing.assert_array_equal(values(samples), ALL)
    assert samples.labels is not None and samples.labels.tolist() == [0, 1, 2, 3, 4]
    assert samples.taken.endswith("5 samples in 3 items, in this order: image, labels")


def test_bare_arrays_serve_a_model_with_one_input() -> None:
    samples = open_samples(BATCHES, IMAGE)
    np.testing.assert_array_equal(values(samples), ALL)
    assert samples.labels is None and "each is image" in samples.taken
    np.testing.assert_array_equal(values(open_samples([batch.tolist() for batch in BATCHES], IMAGE)), ALL)
    with pytest.raises(UsageError, match="is one ndarray, the model has 2 inputs"):
        open_samples([np.ones((1, 3), np.int64)], TEXT)


def test_arrays_in_the_order_of_the_inputs_and_labels_behind_them() -> None:
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.int64)
    for item in ((ids, mask), (ids, mask, np.array([7, 8]))):
        samples = open_samples([item], TEXT)
        assert [sample["ids"].tolist() for sample in samples] == [[[0, 1, 2]], [[3, 4, 5]]]
        assert (samples.labels is None) == (len(item) == 2)
    with pytest.raises(UsageError, match="is 4 arrays, the model has 2 inputs"):
        open_samples([(ids, mask, mask, mask)], TEXT)


@pytest.mark.parametrize("key", ["labels", "label", "__labels__"])
def test_a_dict_may_carry_labels_also_in_a_pair(key: str) -> None:
    feed = {"ids": np.ones((2, 3), np.int64), "mask": np.ones((2, 3), np.int64)}
    for item in ({**feed, key: np.array([4, 5])}, (feed, np.array([4, 5]))):
        labels = open_samples([item], TEXT).labels
        assert labels is not None and labels.tolist() == [4, 5]


def test_an_input_that_is_called_labels_is_an_input() -> None:
    specs = (InputSpec("labels", np.dtype(np.int64), ("N",)),)
    samples = open_samples([{"labels": np.array([1, 2])}], specs)
    assert samples.labels is None and [int(sample["labels"][0]) for sample in samples] == [1, 2]


def test_what_is_no_array_where_labels_would_be_is_left_out_and_said() -> None:
    samples = open_samples([(images(1), [{"boxes": [1, 2, 3, 4]}])], IMAGE)
    assert samples.labels is None and "are left out" in samples.taken


class DataSet:
    """As those of PyTorch: single samples by number, without an end but its length."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return ALL[index], index


def test_a_data_set_gives_single_samples_without_a_batch_axis() -> None:
    samples = open_samples(DataSet(), IMAGE)
    np.testing.assert_array_equal(values(samples), ALL)
    assert samples.labels is not None and samples.labels.tolist() == [0, 1, 2, 3, 4]


class Shuffled:
    """A loader that gives another order each time, and counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self.reads += 1
        order = np.random.default_rng(self.reads).permutation(5)
        yield from ((ALL[[index]], np.array([index])) for index in order)


def test_a_loader_that_shuffles_is_read_once_so_that_labels_stay_with_their_samples() -> None:
    loader = Shuffled()
    samples = open_samples(loader, IMAGE)
    for _ in range(2):
        assert samples.labels is not None
        np.testing.assert_array_equal(values(samples), ALL[samples.labels])
    assert loader.reads == 1 and samples.count == 5


def test_types_that_files_of_numpy_lack_become_float32() -> None:
    found = values(open_samples([images(2).astype(ml_dtypes.bfloat16)], IMAGE))
    assert found.dtype == np.float32 and found.shape == (2, 3, 4, 4)


@pytest.mark.parametrize("name", ["file", "a/b", "../up", "x.npy"])
def test_any_name_of_an_input_is_kept(name: str) -> None:
    specs = (InputSpec(name, np.dtype(np.float32), ("N", 3)),)
    assert next(iter(open_samples([{name: np.ones((1, 3), np.float32)}], specs)))[name].shape == (1, 3)


def test_what_was_kept_goes_with_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples = open_samples((batch for batch in BATCHES), IMAGE)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3
    samples = samples.undivided()
    gc.collect()
    assert len(list(samples)) == 3
    del samples
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_many_items_share_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a decoder are all fed what its encoder says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    encoded = np.arange(1 << 16, dtype=np.float32).reshape(1, 256, 256)
    inputs = [InputSpec("token", np.dtype(np.int64), (1, 1)), InputSpec("encoded", np.dtype(np.float32), (1, 256, 256))]
    samples = open_samples([{"token": np.array([[at]]), "encoded": encoded} for at in range(8)], inputs)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.npz")) < 1.1 * encoded.nbytes
    found = list(samples)
    assert [int(feeds["token"][0, 0]) for feeds in found] == list(range(8))
    assert all(np.array_equal(feeds["encoded"], encoded) for feeds in found)


def test_what_never_ends_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(loaders, "MOST_BYTES", 10 * BATCHES[0].nbytes)
    with pytest.raises(UsageError, match="if they end at all") as caught:
        open_samples(itertools.cycle(BATCHES), IMAGE)
    assert "islice" in caught.value.remedy
    del caught
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (np.ones((1, 3, 4, 4), np.uint8), "is float32, the samples are uint8"),
        (np.full((1, 3, 4, 4), np.nan, np.float32), "NaN"),
        ((np.ones((2, 3, 4, 4), np.float32), np.arange(3)), "3 labels for 2 samples"),
        (np.ones((3, 5, 5), np.float32), r"has the shape \[N, 3, 4, 4\], the samples \[3, 5, 5\]"),
        ({"picture": np.ones((1, 3, 4, 4), np.float32)}, "no input 'picture'"),
        ((), "shape|not an array"),
        (None, "not an array"),
    ],
)
def test_an_item_that_does_not_fit_is_named_with_its_number(item: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        list(open_samples([images(1), item], IMAGE))
    assert "the samples given, item 1" in caught.value.where


SCRIPT = """
import numpy as np
images = np.arange(2 * 48, dtype=np.float32).reshape(2, 3, 4, 4)
pairs = [(images[[index]], np.array([index])) for index in range(2)]
arrays = {"image": images}
def loader():
    return pairs
class Set:
    def __len__(self): return 2
    def __getitem__(self, index): return images[index], index
"""


@pytest.mark.parametrize("name", ["images", "pairs", "arrays", "loader", "Set"])
def test_a_script_may_hold_the_object_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.py").write_text(SCRIPT)
    samples = open_samples(f"{tmp_path / 'data.py'}:{name}", IMAGE)
    assert [sample["image"].flat[0] for sample in samples] == [0, 48]
    assert (samples.labels is None) == (name in ("images", "arrays"))


def test_loaders_data_sets_and_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(ALL), torch.arange(5))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    for source in (data, loader):
        samples = open_samples(source, IMAGE)
        assert samples.labels is not None
        np.testing.assert_array_equal(values(samples), ALL[samples.labels])
    assert "DataLoader): 5 samples in 3 items, in this order: image, labels" in samples.taken
    for source in (torch.from_numpy(ALL).requires_grad_(), [torch.from_numpy(ALL).bfloat16()]):
        np.testing.assert_allclose(values(open_samples(source, IMAGE)), ALL, rtol=1e-2)
