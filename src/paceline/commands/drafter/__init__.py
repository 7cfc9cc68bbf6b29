"""`paceline drafter`."""
