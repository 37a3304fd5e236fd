"""Studies of a model: predicted, measured, and which regions cost accuracy."""
