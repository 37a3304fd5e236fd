"""The performance model: what a kernel has to do, how long that takes on a GPU, and what would make it faster."""
