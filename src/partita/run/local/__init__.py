"""A runtime for small models: every rank of a plan in one process, in float64, exactly compared.

`shards` says what a rank holds of a tensor, `ops` executes one op on all ranks of a mesh,
`reference` runs the whole model in one piece. What the ranks hold in the end, put together, must
be what the whole model gives; a partial sum that was not reduced or a wrong layout shows there.
"""
