"""Sharding and pipelines; none yet."""
