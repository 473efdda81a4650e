"""One GPU, several streams: a model's kernels side by side in one CUDA graph.

export.py      a module as steps            read.py fold.py merge.py: what is launched
place.py       where values lie             bound.py kernels.py ways.py eager.py: how each step runs
pieces.py      steps that become one        compiled.py fuse.py: by torch.compile, if faster
order.py       launch plans                 stages.py improve.py: plans found by measuring
measure.py     tune.py profile.py: times    graphs.py replay.py: one CUDA graph
choose.py      candidates.py: one is kept   api.py record.py emit.py: to call, save, load, read
"""
