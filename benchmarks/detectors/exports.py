"""Export the detectors: as torch's two exporters write them, and with the plugins of TensorRT at their end.

    ZOO/bin/python benchmarks/detectors/exports.py --folder FOLDER [--only NAME,...]

Runs in the environment of benchmarks/zoo; what is there is kept. Those of torchvision are exported by TorchScript, as
its own documentation does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))

TORCHSCRIPT = (
    "tv_ssdlite tv_retinanet tv_fcos tv_fasterrcnn "
    "yolo5 yolo5_nms yolo7_rows yolo8 yolo8_nms yolo8_indices yolo10 yolo11"
).split()
DYNAMO = "yolo8 yolo8_nms yolo10 detr_small rtdetr_small yolos detr_r50 rtdetr_r50 yolos_base".split()
WITH_PLUGIN = {"yolo8_efficient": "EfficientNMS_TRT", "yolo8_batched": "BatchedNMSDynamic_TRT"}


def with_plugin(source: Path, target: Path, plugin: str) -> None:
    """YOLOv8 with the selection that its users put behind it for TensorRT."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(source)
    graph, found = model.graph, model.graph.output[0].name
    batched = plugin.startswith("Batched")
    graph.initializer.append(numpy_helper.from_array(np.asarray([4, 80], np.int64), "parts"))
    nodes = [
        helper.make_node("Transpose", [found], ["rows"], "rows", perm=[0, 2, 1]),
        helper.make_node("Split", ["rows", "parts"], ["coded", "scores"], "split", axis=2),
    ]
    if batched:
        graph.initializer.append(numpy_helper.from_array(np.asarray([2, 2], np.int64), "halves"))
        graph.initializer.append(numpy_helper.from_array(np.asarray(0.5, np.float32), "half"))
        graph.initializer.append(numpy_helper.from_array(np.asarray([2], np.int64), "axis"))
        nodes += [
            helper.make_node("Split", ["coded", "halves"], ["centre", "sizes"], "halves", axis=2),
            helper.make_node("Mul", ["sizes", "half"], ["by"], "by"),
            helper.make_node("Sub", ["centre", "by"], ["low"], "low"),
            helper.make_node("Add", ["centre", "by"], ["high"], "high"),
            helper.make_node("Concat", ["low", "high"], ["corners"], "corners", axis=2),
            helper.make_node("Unsqueeze", ["corners", "axis"], ["boxes"], "boxes"),
        ]
        settings = {"shareLocation": 1, "backgroundLabelId": -1, "numClasses": 80, "topK": 1000, "keepTopK": 100}
        settings |= {"scoreThreshold": 0.25, "iouThreshold": 0.45, "isNormalized": 0, "clipBoxes": 0}
    else:
        settings = {"background_class": -1, "box_coding": 1, "iou_threshold": 0.45, "max_output_boxes": 100}
        settings |= {"score_activation": 0, "score_threshold": 0.25}
    boxes = "boxes" if batched else "coded"
    names = ["num_dets", "det_boxes", "det_scores", "det_classes"]
    nodes.append(
        helper.make_node(plugin, [boxes, "scores"], names, "nms", domain="TRT", plugin_version="1", **settings)
    )
    graph.node.extend(nodes)
    model.opset_import.append(helper.make_opsetid("TRT", 1))
    del graph.output[:]
    shapes = [["batch", 1], ["batch", 100, 4], ["batch", 100], ["batch", 100]]
    types = [
        TensorProto.INT32,
        TensorProto.FLOAT,
        TensorProto.FLOAT,
        TensorProto.FLOAT if batched else TensorProto.INT32,
    ]
    graph.output.extend(
        helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in zip(names, types, shapes, strict=True)
    )
    onnx.save(model, target)
    target.with_suffix(".npz").write_bytes(source.with_suffix(".npz").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the ONNX files go: outside the repository")
    parser.add_argument("--only", default="", help="names, separated by commas")
    options = parser.parse_args()
    import torch
    from export import child  # that of the zoo
    from subject import names

    names()
    import networks  # noqa: F401  # torchvision's operators are defined by then

    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}.torchscript" for name in TORCHSCRIPT] + DYNAMO + list(WITH_PLUGIN)
    for name in options.only.split(",") if options.only else wanted:
        path = options.folder / f"{name}.onnx"
        if path.exists():
            continue
        if name in WITH_PLUGIN:
            with_plugin(options.folder / "yolo8.torchscript.onnx", path, WITH_PLUGIN[name])
            continue
        found = child(name, options.folder)
        print(f"{name}: {found.get('reason') or found['nodes']}, {found['seconds']} s", flush=True)
        if "log" in found:
            print(found["log"])


if __name__ == "__main__":
    main()
