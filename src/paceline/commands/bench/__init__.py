"""`paceline bench`: drafting methods compared on given prompts, each in a process of its own."""
