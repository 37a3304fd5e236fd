"""What every room uses: files, JSON, limits, clocks, packages on demand, ONNX Runtime sessions."""
