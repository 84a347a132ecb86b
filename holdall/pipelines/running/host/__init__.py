"""What a stage leaves in the memory of its host."""
