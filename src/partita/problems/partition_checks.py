"""What a partition problem's fields must hold; each refusal names the field."""

from collections.abc import Sequence

from partita.errors import ProblemError

LARGEST = 1e100  # beyond it sums overflow
MAX_DEVICES = 1_000_000


def check_machine(problem: "PartitionProblem") -> None:
    """Refuse devices, links or options that cannot be."""
    if not isinstance(problem.num_devices, int) or not 1 <= problem.num_devices <= MAX_DEVICES:
        fix = f"1 to {MAX_DEVICES:,} devices can be planned for"
        raise ProblemError(f"is {problem.num_devices}", fix=fix, field="num_devices")
    check_positive(
        problem.bandwidth_bytes_per_s, "bandwidth", "a positive number of bytes per second"
    )
    _check_length(problem.memory_bytes, problem, "memory")
    for index, cap in enumerate(problem.memory_bytes):
        _check_amount(cap, f"memory[{index}]")
    _check_length(problem.speeds, problem, "speeds")
    for index, speed in enumerate(problem.speeds):
        check_positive(speed, f"speeds[{index}]", "a positive factor")
    if problem.links is not None:
        _check_links(problem)
    for count, name in ((problem.in_flight, "in_flight"), (problem.num_stages, "num_stages")):
        if count is not None and (not isinstance(count, int) or not 1 <= count <= MAX_DEVICES):
            fix = f"a whole number from 1 to {MAX_DEVICES:,} is needed"
            raise ProblemError(f"is {count}", fix=fix, field=name)


def _check_links(problem: "PartitionProblem") -> None:
    links = problem.links
    assert links is not None
    for table, name in ((links.bandwidth, "bandwidth"), (links.latency_s, "latency_s")):
        if not table and name == "latency_s":
            continue
        field = f"links.{name}"
        _check_length(table, problem, field, needed=True)
        for index, row in enumerate(table):
            _check_length(row, problem, f"{field}[{index}]", needed=True)
            for other, value in enumerate(row):
                where = f"{field}[{index}][{other}]"
                if index == other:
                    continue  # nothing is sent to oneself
                if name == "bandwidth":
                    check_positive(value, where, "a positive number of bytes per second")
                else:
                    _check_amount(value, where)


def _check_length(
    values: Sequence[object], problem: "PartitionProblem", field: str, needed: bool = False
) -> None:
    if (values or needed) and len(values) != problem.num_devices:
        fix = f"one entry per device is needed: {problem.num_devices}"
        raise ProblemError(f"has {len(values)} entries", fix=fix, field=field)


def check_positive(value: float, field: str, needed: str) -> None:
    """Refuse what is not a positive number of a sane size."""
    if not 1 / LARGEST <= value <= LARGEST:
        raise ProblemError(f"is {value}", fix=f"{needed} is needed", field=field)


def check_nodes(problem: "PartitionProblem") -> None:
    """Refuse ids that are there twice and amounts that make no sense."""
    seen: set[int] = set()
    for index, node in enumerate(problem.nodes):
        if node.id in seen:
            fix = "every node needs an id of its own"
            raise ProblemError(f"{node.id} is there twice", fix=fix, field=f"nodes[{index}].id")
        seen.add(node.id)
        for name in ("fwd_ms", "bwd_ms", "params", "out_bytes", "param_bytes", "activation_bytes"):
            _check_amount(getattr(node, name), f"nodes[{index}].{name}")
        _check_times(problem, node, f"nodes[{index}].times_ms")
    if all(node.is_input for node in problem.nodes):
        fix = 'give at least one node whose type is not "IN"'
        raise ProblemError("hold nothing to place", fix=fix, field="nodes")
    for index, output in enumerate(problem.outputs):
        if output not in seen:
            fix = "name the id of a node"
            raise ProblemError(f"there is no node {output}", fix=fix, field=f"outputs[{index}]")


def _check_times(problem: "PartitionProblem", node: "PartitionNode", field: str) -> None:
    if not node.times_ms:
        return
    if problem.speeds:
        fix = "leave out one of them: a time per device already says how fast it is"
        raise ProblemError("are there as well as speeds", fix=fix, field=field)
    _check_length(node.times_ms, problem, field)
    for device, pair in enumerate(node.times_ms):
        for ms in pair:
            _check_amount(ms, f"{field}[{device}]")


def check_edges(problem: "PartitionProblem") -> None:
    """Refuse edges between nodes that are not there."""
    inputs = {node.id: node.is_input for node in problem.nodes}
    for index, edge in enumerate(problem.edges):
        for end, name in ((edge.src, "src"), (edge.dst, "dst")):
            if end not in inputs:
                fix = "name the id of a node"
                raise ProblemError(
                    f"there is no node {end}", fix=fix, field=f"edges[{index}].{name}"
                )
        if inputs[edge.dst]:
            fix = 'a node of type "IN" consumes nothing'
            raise ProblemError(f"{edge.dst} is an input", fix=fix, field=f"edges[{index}].dst")
        for name in ("fwd_bytes", "bwd_bytes"):
            _check_amount(getattr(edge, name), f"edges[{index}].{name}")


def _check_amount(amount: float, field: str) -> None:
    if not 0 <= amount <= LARGEST:  # also refuses NaN
        fix = f"a number from 0 to {LARGEST:g} is needed"
        raise ProblemError(f"is {amount}", fix=fix, field=field)
