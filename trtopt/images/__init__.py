"""Pictures as samples: how they are prepared for a network, read, and labelled."""
