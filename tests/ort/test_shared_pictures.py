"""The shared models on their own pictures, in folders and without a word on how they are prepared: the figures are
those of the script that comes with the models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow: pip install 'trtopt[images]'")
pytest.importorskip("pycocotools", reason="metrics of boxes are computed by it: pip install 'trtopt[images]'")

from trtopt.config import BuildConfig
from trtopt.events import ignore
from trtopt.pipeline.settings import DataSources, read_inputs, settle
from trtopt.support.clock import Clock

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT.parent / "shared" / "models"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.long,
    pytest.mark.skipif(not MODELS.is_dir(), reason="the shared models are not beside the checkout"),
]


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AssertionError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    loaded(ROOT / "benchmarks" / "pictures" / "unpack.py").unpack(MODELS, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "file", "folder", "metric"),
    [
        ("resnet20_cifar10", "model.onnx", "resnet20", "top1"),
        ("squeezenet11_fp16", "model_fp16.onnx", "squeezenet", "top1"),
        ("squeezenet11_fp16", "model.onnx", "squeezenet", "top5"),
        ("fastestdet_coco", "model.onnx", "fastestdet", "map50"),
    ],
)
def test_the_figures_are_those_of_the_models_own_script(
    pictures: Path, tmp_path: Path, name: str, file: str, folder: str, metric: str
) -> None:
    model, calib, check = MODELS / name / file, pictures / folder / "calib", pictures / folder / "val"
    config = BuildConfig(output=str(tmp_path / "x.engine"), metric=metric, calib=str(calib), eval=str(check))
    settings = settle(model, config, calib, Clock(ignore), make_engine=True)
    inputs = read_inputs(settings, DataSources(str(calib), str(check), metric), Clock(ignore))
    script = loaded(MODELS / "evaluate.py")
    runner = script.ort_runner(str(MODELS / name / "model.onnx"))
    assert inputs.metric is not None and inputs.metric.baseline == pytest.approx(
        script.metric(name, runner)[metric], abs=0.002
    )
