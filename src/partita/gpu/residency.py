"""How many programs of a kernel a GPU holds at once: the most that may wait for each other."""

from typing import Any

import torch

from partita.errors import ProblemError

REGISTERS = 65_536  # of a unit, since Kepler
MOST_PROGRAMS = 32  # of a unit
RESERVED_SHARED = 1024  # bytes that CUDA keeps of every program


def resident_programs(compiled: Any, num_warps: int, device: torch.device) -> int:
    """From the registers and shared memory of the compiled kernel."""
    properties = torch.cuda.get_device_properties(device)
    threads = 32 * num_warps
    registers = -(max(compiled.n_regs, 16) // -8) * 8 * threads
    shared = compiled.metadata.shared + RESERVED_SHARED
    fit = min(
        REGISTERS // registers,
        properties.max_threads_per_multi_processor // threads,
        properties.shared_memory_per_multiprocessor // shared,
        MOST_PROGRAMS,
    )
    return int(fit * properties.multi_processor_count)


def check_resident(programs: int, resident: int, about: str) -> None:
    """Refuse a kernel of which some program could wait for one that has not started."""
    if programs > resident:
        raise ProblemError(
            f"{programs} programs, but only {resident} are resident at once ({about})",
            fix="use fewer programs, larger tiles or fewer warps",
        )


def resources(compiled: Any) -> str:
    """What a compiled kernel needs, as text."""
    return (
        f"{compiled.n_regs} registers, {compiled.n_spills} spills, "
        f"{compiled.metadata.shared} bytes shared"
    )
