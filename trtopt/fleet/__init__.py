"""Many builds: planned, spread over processes or a Ray cluster, kept by their content."""
