"""What a run did, as data: the JSON contract, and its renderings."""
