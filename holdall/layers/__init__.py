"""Layers that save memory by changing the model's computation."""
