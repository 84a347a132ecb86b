"""Steps whose tensors lie at planned offsets: an arena in front of torch's own allocator (`arena.cpp`)."""
