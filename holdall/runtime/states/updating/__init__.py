"""Updates of placed parameters: when, where and in which order they are made."""
