"""One GPU, several streams: a model's kernels side by side in one CUDA graph.

export.py   a module as steps         read.py fold.py merge.py: what is launched
place.py    where values lie          bound.py kernels.py ways.py eager.py: how each step runs
order.py    launch plans              stages.py improve.py: plans found by measuring
measure.py tune.py profile.py         graphs.py replay.py: one CUDA graph
choose.py   candidates, one is kept   api.py record.py emit.py: to call, save, load, read
"""
