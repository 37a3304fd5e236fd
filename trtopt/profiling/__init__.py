"""Measured times: read from files or taken here, joined with predictions, and explained."""
