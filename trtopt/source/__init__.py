"""Models in and out: ONNX files loaded, checked, converted and saved; PyTorch modules exported."""
