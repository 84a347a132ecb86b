"""Which plan a step runs by, and when that changes."""
