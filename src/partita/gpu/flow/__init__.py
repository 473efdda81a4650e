"""A model as a flow of steps, which streams and rtasks share.

export.py      a module exported in evaluation mode       read.py: its torch program as steps
steps.py       what a step is                             eager.py: what it computes
fold.py        passes that launch less                    place.py: where values lie
precision.py   which convolutions of PyTorch round to TF32
"""
