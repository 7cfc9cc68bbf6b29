"""What a user sees while something runs, and how Ctrl-C is obeyed."""
