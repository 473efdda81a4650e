"""Models for capture and what is done with captured models."""
