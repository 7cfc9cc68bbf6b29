"""`paceline doctor`: what is installed, what fits, whether this machine is batch-invariant."""
