"""Engines: the two compilers, what they made of a graph, and running the result."""
