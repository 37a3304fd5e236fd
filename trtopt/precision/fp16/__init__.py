"""Sixteen-bit floats: what must stay FP32, and the types written into the graph."""
