"""A plan on a GPU has the numbers of one process there."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_one_rank_on_nccl_has_the_numbers_of_one_process():
    from distributed_gpu import run_on_gpu

    for case, error in run_on_gpu().items():
        assert error <= 1e-5, case
