"""GPUs: the table of what is known of them, and the one that is present."""
