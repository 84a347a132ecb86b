"""Gradients of placed parameters: collected, offloaded, scaled, consumed."""
