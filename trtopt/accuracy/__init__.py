"""Accuracy: the optimized graph compared with FP32, metrics, gates."""
