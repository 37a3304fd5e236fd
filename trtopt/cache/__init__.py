"""The folder that keeps what is slow to make, and its checksummed files and lines."""
