"""Timelines for people: in the terminal, as a picture, as a trace for a trace viewer."""
