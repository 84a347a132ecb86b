"""The library that planners are written with."""
