"""One file per action: its data, its effect on the schedule (`rewrite`) and on the model (`install`)."""
