"""Activations in a run: recomputed, offloaded, compressed."""
