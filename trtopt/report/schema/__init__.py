"""The JSON contract as dataclasses, written and read."""
