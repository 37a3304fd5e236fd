"""One run of build or optimize: its stages."""
