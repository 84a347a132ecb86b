"""Layers that save memory by what they compute."""
