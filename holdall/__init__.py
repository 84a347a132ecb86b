"""Train any model in the memory you have."""
