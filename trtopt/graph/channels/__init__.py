"""Channel groups: which channels of a network are the same ones, and what changes them."""
