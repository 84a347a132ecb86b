"""Model states in a run: streamed weights, offloaded gradients, updates on the device and on the host."""
