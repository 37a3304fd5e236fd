"""Precision: observe ranges, decide, write the decision into the graph."""
