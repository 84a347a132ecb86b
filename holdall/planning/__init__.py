"""The library for writing planners."""
