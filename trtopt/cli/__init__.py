"""The command line: one module per command. Nothing else prints."""
