"""A training run from a recipe (`paceline train`): TRL trains, engines roll out, everything is recorded."""
