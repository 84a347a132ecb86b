"""Measures the time of ops on this machine."""
