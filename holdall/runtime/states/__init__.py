"""Model states in a run: weights streamed, gradients offloaded, updates made on device and host."""
