"""Which random numbers an op draws.

In one process (`partita.pipe`, the module itself) all ops draw from PyTorch's generator, in the
order of the program: the seed that the user sets decides, and stages draw what the module draws.

On ranks (`partita.execute`, the local runtime) there is no order that all plans share. There each
op begins with a generator of its own, seeded by its place: the seed of the run, the step, the
micro-batch and the op's name. Whatever the plan splits, recomputes or puts into other stages, and
on one rank as on many, an op draws the same numbers, and the same again with the same seed.
"""

import zlib


def place_seed(op: str, seed: int, step: int, microbatch: int) -> int:
    """The seed of what an op draws for one micro-batch of one step."""
    return zlib.crc32(f"{op}/{seed}/{step}/{microbatch}".encode())
