"""A plan on a GPU has the numbers of one process there."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_one_rank_on_nccl_has_the_numbers_of_one_process():
    from distributed_gpu import run_on_gpu

    for case, error in run_on_gpu():
        assert error <= 1e-5, case


def test_two_ranks_that_share_a_gpu_have_the_numbers_of_one_process_on_gloo():
    from distributed_gpu import run_shared

    for case, error in run_shared().items():
        assert error <= 1e-5, case


def test_nccl_refuses_two_ranks_on_one_gpu_in_one_sentence(tmp_path):
    from distributed_gpu import by_command

    if torch.cuda.device_count() > 1:
        pytest.skip("each of the two ranks has a GPU of its own here")
    code, said = by_command(tmp_path, "--device", "cuda")
    assert code != 0
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "processes 0, 1 share a GPU" in lines[0]
    assert "--backend gloo" in lines[0]
