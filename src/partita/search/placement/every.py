"""Every placement of a small problem, compiled: what other methods do when there are few."""

import itertools
import math

import numpy as np

from partita.problems.placement import PlacementSolution
from partita.search.base import Result, Status
from partita.search.placement.attempt import Attempt
from partita.search.placement.tables import PlacementArrays
from partita.search.placement.variation import layers_of_genes


def num_placements(net: PlacementArrays) -> int:
    """How many ways there are to place the genes, valid or not."""
    return math.prod(np.diff(net.allowed_start).tolist())


def all_tried(attempt: Attempt) -> Result[PlacementSolution]:
    """Score every placement there is."""
    net, before = attempt.net, attempt.run.evaluations
    devices = [
        net.allowed[begin:end].tolist()
        for begin, end in itertools.pairwise(net.allowed_start.tolist())
    ]
    genes = np.array(list(itertools.product(*devices)), np.int64)
    attempt.score(layers_of_genes(net, genes))
    if attempt.run.evaluations - before < len(genes):
        return attempt.result()
    return attempt.result(Status.OPTIMAL, "every placement was tried")
