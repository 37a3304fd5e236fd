"""Weights alone in four or eight bits: the formats, the numbers, and how they are written."""
