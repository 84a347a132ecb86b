"""One file per published way to choose actions. Each ends in `planning.finish.finish`, which judges all plans alike."""
