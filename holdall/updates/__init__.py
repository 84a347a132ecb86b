"""The engine's optimizer steps: parts of the user's optimizer, and Adam on the host."""
