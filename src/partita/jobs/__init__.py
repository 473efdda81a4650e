"""Whole jobs, as the command line and the Python API offer them: from names to results."""
