"""A package, whose fixtures end with the last test of the folder: an idle fleet and its Ray take a fifth of a core."""
