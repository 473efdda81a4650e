"""One GPU, several streams: a model's kernels side by side in one CUDA graph.

merge.py       what is launched             bound.py ways.py: how each step runs
pieces.py      steps that become one        compiled.py fuse.py: by torch.compile, if faster
order.py       launch plans                 stages.py improve.py: plans found by measuring
tune.py        times of steps               launch.py replay.py: one CUDA graph
choose.py      candidates.py: one is kept   api.py record.py emit.py: to call, save, load, read
"""
