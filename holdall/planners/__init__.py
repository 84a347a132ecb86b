"""One file per published way to choose actions. Each ends in `_finish.finish`: one ruler for all."""
