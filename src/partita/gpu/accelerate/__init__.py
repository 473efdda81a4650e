"""One front door: `partita.accelerate` tries streams, rtasks and PyTorch, and keeps the best.

search.py    candidates: ours tried in a child process first, then built here, checked, timed
work.py      what a child does: the search of streams, or of rtasks
weights.py   have the weights changed since?
report.py    what was tried, what was kept and why
api.py       something to call like the module
"""
