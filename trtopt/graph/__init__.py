"""ONNX graphs, on ``onnx_ir``: pure and fast, no runtime."""
