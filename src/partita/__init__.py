"""Partita plans, proves and runs the parallel execution of deep-learning models."""

__version__ = "0.1.0"
