"""The ranks that have one stage together: how they divide what it computes, and share its parameters."""
