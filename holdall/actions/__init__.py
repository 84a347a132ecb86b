"""One file per technique: its data, what it does to the schedule (`rewrite`) and what it does to the model (`install`)."""
