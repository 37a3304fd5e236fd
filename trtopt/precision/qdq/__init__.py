"""Q/DQ written into a graph, and the Q/DQ that a model came with."""
