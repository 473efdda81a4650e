"""All Triton code.

images.py      kernels over images, launched one by one: convolution, window, weighted sum
tiles.py       the code of one tile of every kind of op, called by a region's persistent kernel
recurrent.py   layers of LSTM, GRU and plain cells, as one launch
decode.py      greedy decoding of recurrent layers, as one launch
transformer.py one token of a transformer decoder

There are two convolutions, and they stay two. That of `images.py` is compiled once for all shapes
(every size is an argument), runs grouped convolutions, and may split its sum among programs. That
of `tiles.py` is a function inside a generated kernel: sizes are constants, so that a row of the
task table is all it reads; weights are read before it waits, inputs past the L1 cache after it. One
code for both would carry the waits into the first or the arguments into the second.
"""
