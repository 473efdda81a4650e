"""Whether all programs of a compiled kernel are on the device at once.

A program that waits for one that has not started would wait for ever, so this is checked from the
registers and shared memory of what was compiled, before the first launch.
"""

from typing import Any

import torch

from partita.errors import ProblemError


def num_resident(compiled: Any, num_warps: int, device: torch.device) -> int:
    """How many programs of a compiled Triton kernel the device holds at once."""
    properties = torch.cuda.get_device_properties(device)
    threads = 32 * num_warps
    registers = -(max(compiled.n_regs, 16) // -8) * 8 * threads
    fit = min(65536 // registers, properties.max_threads_per_multi_processor // threads, 32)
    shared = compiled.metadata.shared + 1024
    fit = min(fit, properties.shared_memory_per_multiprocessor // shared)
    return int(fit * properties.multi_processor_count)


def check_resident(compiled: Any, num_programs: int, num_warps: int, device: torch.device) -> None:
    """Refuse a kernel of which some program could wait for one that has not started."""
    resident = num_resident(compiled, num_warps, device)
    if num_programs > resident:
        raise ProblemError(
            f"{num_programs} programs, but only {resident} are resident at once "
            f"({about(compiled, num_programs)})",
            fix="use larger blocks or fewer warps",
        )


def about(compiled: Any, num_programs: int) -> str:
    """The resources of a compiled kernel."""
    if compiled is None:
        return "not compiled"
    return (
        f"{num_programs} programs, {compiled.n_regs} registers, "
        f"{compiled.n_spills} spills, {compiled.metadata.shared} bytes shared"
    )
