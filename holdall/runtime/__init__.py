"""The machinery that actions use; knows no action by name."""
