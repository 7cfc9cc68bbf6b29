"""The tests; a package so that one of its folders, fleet, is a package that hides no module of the same name."""
