"""The kinds of source that a model comes from, and what builds its network."""
