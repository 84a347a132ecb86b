"""Bytes in a run: counted, measured, explained."""
