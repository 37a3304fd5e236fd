"""Who says what a graph costs, and which 8-bit regions pay by it."""
