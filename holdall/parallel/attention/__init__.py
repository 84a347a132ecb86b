"""Attention over sequences that are divided over ranks."""
