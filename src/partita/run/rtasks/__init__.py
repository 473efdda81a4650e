"""Whole graphs as one persistent kernel: rPrograms turned into Triton and run on a GPU."""
