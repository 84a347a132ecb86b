"""Measures this machine, and describes others by name."""
