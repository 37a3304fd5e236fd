"""torchvision's wheels do not load their C++ operators beside the CPU build of torch: import this first."""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
_LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_LIBRARY.define(
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


@torch.library.impl(_LIBRARY, "nms", "CPU")
def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The boxes (x1, y1, x2, y2) that no better one overlaps by more than the threshold, best first."""
    area = (dets[:, 2:] - dets[:, :2]).prod(1)
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        low, high = dets[kept, :2].maximum(dets[index, :2]), dets[kept, 2:].minimum(dets[index, 2:])
        both = (high - low).clamp(min=0).prod(1)
        if not (both / (area[kept] + area[index] - both) > iou_threshold).any():
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)
