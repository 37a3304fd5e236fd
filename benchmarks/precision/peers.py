"""What the other quantizers make of a model. Run in a virtual environment that has the tool, and not trtopt.

    python peers.py modelopt int8|fp8 fp16|fp32 0|BATCH MODEL.onnx SAMPLES.npz OUT.onnx
    python peers.py ort|ort-products MODEL.onnx SAMPLES.npz OUT.onnx
    python peers.py half MODEL.onnx OUT.onnx

With a batch, Model Optimizer is given the model with a free first axis, as most exports have it, and calibrates image
by image; the axis gets that size afterwards. SAMPLES may be a folder of feeds. ``half`` turns what is FP32 in a
quantized model into FP16, with the function that Model Optimizer uses for its own.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx


def modelopt(mode: str, high: str, batch: str, model: str, samples: str, out: str) -> None:
    """Model Optimizer's defaults, calibrated on the CPU."""
    from modelopt.onnx.quantization import quantize

    with tempfile.TemporaryDirectory() as folder:  # it edits the file it is given, and leaves others beside it
        source, made = (str(Path(folder) / name) for name in ("model.onnx", "made.onnx"))
        if batch == "0":
            shutil.copy(model, source)
        else:
            with_first_axis(model, source, None)
        options = {"quantize_mode": mode, "high_precision_dtype": high, "output_path": made, "log_level": "WARNING"}
        options["calibration_eps"] = ["cpu"]
        if Path(samples).is_dir():
            quantize(source, calibration_data_reader=reader(samples), **options)
        else:
            feeds = next(iter(feeds_of(samples)))
            quantize(source, calibration_data=feeds if len(feeds) > 1 else next(iter(feeds.values())), **options)
        if batch == "0":
            shutil.move(made, out)
        else:
            with_first_axis(made, out, int(batch))


def feeds_of(samples: str) -> Iterator[dict[str, np.ndarray]]:
    """The feed of an .npz, or those of a folder of them."""
    path = Path(samples)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with np.load(file) as arrays:
            yield {name: arrays[name] for name in arrays}


def reader(samples: str) -> Any:
    """The feeds as ONNX Runtime's quantizer and Model Optimizer take them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rewind()

        def rewind(self) -> None:
            self.feeds = feeds_of(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

        def get_first(self) -> dict[str, np.ndarray]:
            return next(feeds_of(samples))

    return Reader()


def with_first_axis(source: str, target: str, size: int | None) -> None:
    """Give inputs and outputs this first axis, None for a free one; types of other values are left out."""
    model = onnx.load(source)
    for value in (*model.graph.input, *model.graph.output):
        axis = value.type.tensor_type.shape.dim[0]
        axis.Clear()
        if size is None:
            axis.dim_param = "batch"
        else:
            axis.dim_value = size
    del model.graph.value_info[:]
    onnx.save(model, target)


def ort_products(model: str, samples: str, out: str) -> None:
    """As ONNX Runtime's examples for TensorRT do it with transformers: products only, their results not quantized."""
    ort(model, samples, out, ["Conv", "Gemm", "MatMul"])


def ort(model: str, samples: str, out: str, products: list[str] | None = None) -> None:
    """Static Q/DQ as TensorRT reads it: symmetric signed INT8, weights per channel, biases left alone."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        ready = str(Path(folder) / "ready.onnx")
        quant_pre_process(model, ready, skip_symbolic_shape=True)
        options: dict[str, Any] = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
        if products is not None:
            options |= {"OpTypesToExcludeOutputQuantization": products, "DedicatedQDQPair": True}
            options["QDQOpTypePerChannelSupportToAxis"] = {"MatMul": 1}
        quantization.quantize_static(
            ready, out, reader(samples), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
            activation_type=quantization.QuantType.QInt8, weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=products, extra_options=options,
        )  # fmt: skip


def half(model: str, out: str) -> None:
    """Inputs and outputs keep their types."""
    from modelopt.onnx.autocast import convert_to_f16

    onnx.save(convert_to_f16(onnx.load(model)), out)


if __name__ == "__main__":
    commands = {"modelopt": modelopt, "ort": ort, "ort-products": ort_products, "half": half}
    commands[sys.argv[1]](*sys.argv[2:])
