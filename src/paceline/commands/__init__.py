"""The commands of the command line, one module each; `cli.py` registers them, and imports nothing heavy by it."""
