"""Better numbers for 8-bit nodes: channels scaled, weights rounded together, biases corrected."""
