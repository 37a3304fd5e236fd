"""Graph rewrites: what a recipe is, where recipes come from, and how they are applied."""
