"""One GPU: a model made faster on it, by streams, by tiles, by persistent recurrent kernels.

flow/       a module as steps of a few kinds: exported, read, folded, laid out in memory
kernels/    all Triton code: over images, of tiles, of recurrent layers, of a decoder
graphs.py   CUDA graphs            measure.py: times, in turns against drift
reference_output.py: is an output right?   choose.py: of what is right, the fastest is kept
sequential.py the baseline: PyTorch's operators in order, in one graph
streams/    `partita.streams`: kernels side by side in one CUDA graph
rtasks/     `partita.rtasks`: small ops as tiles of persistent kernels
recurrent/  `partita.persistent`: recurrent layers and greedy decoders, one launch each
model.py    a model named by a user, put on the GPU for either
"""
