"""The search for the fastest precision within an accuracy budget."""
