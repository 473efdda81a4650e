"""How a plan is started, in words."""

from partita.jobs.launch_command import launch_lines, run_command
from partita.jobs.plan import plan
from partita.plans import Plan
from partita.search.base import Stop


def planned(machine: str) -> Plan:
    answer = plan("alexnet", machine, batch=16, pin=("pp=1",), stop=Stop(time_s=0.0))
    assert answer.plan is not None
    return answer.plan


def test_on_one_machine_a_rank_for_each_device():
    line = "torchrun --standalone --nproc-per-node 4 -m partita run plan.json"
    assert run_command(planned("4xA100"), "plan.json") == line


def test_on_several_machines_the_line_is_for_each_of_them():
    line = run_command(planned("2x2xA100"), "a plan.json")
    assert line == (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        "-m partita run 'a plan.json'"
    )


def test_machines_with_unlike_numbers_of_devices_are_told_as_one():
    assert "--standalone --nproc-per-node 3 " in run_command(planned("1xA100+2xA100"), "p")


def test_a_script_is_started_on_cpu_ranks_of_one_machine_and_on_gpus():
    cpu, gpu = launch_lines(planned("2x2xA100"), "train.py")
    assert cpu == "torchrun --standalone --nproc-per-node 4 train.py"
    assert gpu.startswith("torchrun --nnodes 2 --nproc-per-node 2 ")
    assert gpu.endswith(" train.py --device cuda")
