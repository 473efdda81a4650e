"""Running plans: stages in turn in one process, and what is built on that."""
