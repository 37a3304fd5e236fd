"""Reports as a terminal shows them."""
