"""Bytes in a run: counting, measuring, explaining an out-of-memory error."""
