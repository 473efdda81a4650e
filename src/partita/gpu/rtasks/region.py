"""A fused region as one persistent kernel: its table of tasks, and the launch.

    region = Region(region_ops, tiles, program, data, wide)      # data, wide: the arenas
    region()                                              # one launch on the current stream

The program was proven safe against a number of resident programs (`check_rprogram`); what the
compiled kernel really needs is known only now, so that is checked again before the first launch.
Before that, the table itself is proven to touch nothing but the arenas, to read nothing too early
and to end (`check_table.py`).
On the CPU, under Triton's interpreter, one program runs all tasks in an order that the waits allow,
and every wait is checked.
"""

from collections.abc import Sequence
from typing import Any

import torch

from partita.errors import VerificationError
from partita.gpu.residency import check_resident, resident_programs, resources
from partita.gpu.rtasks.arena import RegionOps
from partita.gpu.rtasks.check_table import check_table
from partita.gpu.rtasks.generate import Source
from partita.gpu.rtasks.table import launch_table
from partita.gpu.rtasks.tileops import Tile
from partita.problems.rprogram import RProgram

T = torch.Tensor


class Region:
    """A compiled region over its arenas."""

    def __init__(
        self,
        region: RegionOps,
        tiles: Sequence[Tile],
        program: RProgram,
        data: T,
        wide: T,
        num_warps: int = 4,
        delay: int = 0,
    ) -> None:
        self.data, self.wide, self.num_warps, self.delay = data, wide, num_warps, delay
        ops = region.ops
        self.source = Source(ops, tiles)
        self.spins = data.device.type == "cuda"
        codes = self.source.codes
        table = launch_table(ops, codes, program, alone=not self.spins)
        check_table(ops, region.reads_from, tiles, codes, table, data.numel(), wide.numel())
        self.num_programs = table.num_programs
        integers: dict[str, Any] = {"dtype": torch.int32, "device": data.device}
        self.table = torch.tensor(table.rows, **integers)
        self.starts = torch.tensor(table.starts, **integers)
        self.waits = torch.tensor(table.waits or ((0, 0),), **integers)
        self.flags = torch.zeros(len(ops), **integers)
        self.state = torch.zeros(
            3, **integers
        )  # launches so far, programs that ended, a failed check
        self.kernel = self.source.module().region
        self._compiled: Any = None

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.data, self.wide, self.table, self.starts, self.waits, self.flags, self.state,
            self.num_programs, self.spins, self.delay,
        )  # fmt: skip

    def __call__(self) -> None:
        """Run all tasks once."""
        if self.spins and self._compiled is None:
            self.compile()
        self.kernel[(self.num_programs,)](*self._arguments(), num_warps=self.num_warps)
        if not self.spins and self.state[2]:
            raise VerificationError(("a task ran before what it waits for was written",))

    def compile(self) -> None:
        """Compile it and check that all programs are resident at once."""
        self._compiled = self.kernel.warmup(
            *self._arguments(), grid=(self.num_programs,), num_warps=self.num_warps
        )
        self._compiled._init_handles()
        check_resident(self.num_programs, self.num_resident(), resources(self._compiled))

    def num_resident(self) -> int:
        """How many programs of the compiled kernel the device holds at once."""
        return resident_programs(self._compiled, self.num_warps, self.data.device)

    def about(self) -> str:
        """The programs, the branches and, once compiled, the resources of the kernel."""
        words = f"{self.num_programs} programs, {len(self.source.branches)} kinds of tasks"
        return words if self._compiled is None else f"{words}, {resources(self._compiled)}"
