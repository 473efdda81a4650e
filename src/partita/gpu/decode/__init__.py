"""One token of a decoder at memory bandwidth: five launches a layer in one CUDA graph.

spec.py       sizes, and what can be run
weights.py    the weights of a model, packed as the kernels read them
step.py       buffers, launches, the graph; `partita.decode_step`
tune.py       block sizes, measured over the whole step
plain.py      the same in plain PyTorch: what it means
"""
