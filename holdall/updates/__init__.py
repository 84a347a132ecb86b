"""The engine's optimizer steps: the user's optimizer over parts of its parameters, and Adam on the host."""
