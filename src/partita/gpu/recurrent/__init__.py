"""Recurrent layers and greedy decoders as persistent kernels: one launch, weights in registers.

api.py       `partita.persistent`          program.py: what programs wait for, to be proven
layers.py    layers, compiled and called   spec.py pack.py tune.py: which shapes, weights, times
decode.py    a greedy decoder              decode_spec.py: how it is dealt to programs
"""
