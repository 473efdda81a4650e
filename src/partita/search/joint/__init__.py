"""Choosing where to cut a chain into stages, together with how each stage is run.

cuts     dynamic programming over cuts: the least bottleneck and fill, under a memory cap
"""
