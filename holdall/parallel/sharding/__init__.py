"""Model states in shards over ranks of data: by torch's own engine, and by rule where there are no ranks."""
