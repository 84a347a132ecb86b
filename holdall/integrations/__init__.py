"""Thin adapters to trainers; none yet."""
