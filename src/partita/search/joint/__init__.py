"""Choosing where to cut a chain into stages, together with how each stage is run.

meshes   which devices form stages, and their meshes
cuts     dynamic programming over cuts: the least bottleneck and fill, under a memory cap
turns    the same where groups of devices take turns with several stages each
rounds   for orders that go round and round: rounds of stages of equal length
thrift   which of such stages run in ways that take less room
drafts   plans on paper for given groups of devices and numbers of micro-batches
bounds   what no plan with given groups and micro-batches is below
least    what a plan takes at the very least, before it is simulated
"""
