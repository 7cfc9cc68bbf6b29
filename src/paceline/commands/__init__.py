"""The commands of the command line: a module or a folder for each, and in `inputs/` what several of them are given.

`cli.py` registers them, and imports nothing heavy by it.
"""
