"""What must hold of a model in CI: a report against thresholds and against a baseline report."""
