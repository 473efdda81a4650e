"""One GPU: a model made faster on it, by streams, by tiles, by persistent recurrent kernels.

accelerate/           `partita.accelerate`: the front door: all of these and PyTorch, the best kept
streams/              `partita.streams`: kernels side by side in one CUDA graph
rtasks/               `partita.rtasks`: small ops as tiles of persistent kernels
decode/               `partita.decode_step`: a token of a Llama-like model at memory bandwidth
recurrent/            `partita.persistent`: recurrent layers and greedy decoders, one launch each
model.py              a model named by a user, put on the GPU for either of the first two

They share

flow/                 a module as steps of a few kinds: exported, read, folded, laid out in memory
kernels/              all Triton code: images, tiles, recurrent layers, decoders
graphs.py             CUDA graphs, and what they need to stay in memory
buffers.py            inputs and outputs of whole calls, copied together or not at all
bounds.py             how far a kernel reaches, checked before it is launched
trial.py              what may fail badly runs in a process of its own
measure.py            times in turns against drift, by the one clock (`run/clock.py`)
reference_output.py   is an output right?
choose.py             of what can be built and is right, the fastest is kept
sequential.py         the baseline: PyTorch's operators in order, in one graph
step_times.py         times of steps, kept in the profile database (`costs/measured.py`)
"""
