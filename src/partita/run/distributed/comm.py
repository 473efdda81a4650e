"""Messages and collectives of one rank: process groups, tags, and what is still on its way.

Ranks are the devices of the plan in ascending order. Collectives that an op waits for and those
that are overlapped (parameter gathers, gradient reductions) have process groups of their own, so
that neither queues behind the other. A process group has its ranks in ascending order, a line of a
mesh in the mesh's: what is gathered or shared out is brought from one order into the other here.
A message between two ranks is known by its number on the directed link between them: on gloo that
is its tag; NCCL has no tags, so there each directed link is a group of its own and both ends go by
the program's order. gloo takes tensors of the host alone: where it serves GPUs (several ranks that
share one, which NCCL refuses), what is sent goes through the host.

Everything is asynchronous: a `Pending` is what has been started, `wait` gives the result. Sums are
added in the order of the backend's own algorithm, the same on all ranks of a group.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

T = torch.Tensor
Line = tuple[int, ...]
# Their names since torch 2.13, which warns of the earlier ones.
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waiting:
    """Does this rank wait for others right now? Whoever records a run takes its place."""

    __slots__ = ("now", "task")

    def __init__(self) -> None:
        self.now = False
        self.task: Any = None  # what starts messages and collectives at the moment

    def begin(self, task: Any) -> None:
        """The result of what a task started is waited for."""
        self.now = True  # whoever waits for others does not hang itself

    def end(self, task: Any) -> None:
        """It is there."""
        self.now = False


class Pending:
    """Something that is on its way; `wait` gives what it becomes."""

    __slots__ = ("finish", "handle", "keeps", "known", "task", "waiting")

    def __init__(
        self, handle: Any, finish: Callable[[], Any], keeps: Any = None,
        waiting: "Waiting | None" = None,
    ) -> None:  # fmt: skip
        self.handle, self.finish, self.keeps, self.waiting = handle, finish, keeps, waiting
        self.known: Any = None
        self.task = None if waiting is None else waiting.task

    def wait(self) -> Any:
        """The result, once it is there."""
        if self.handle is not None:
            if self.waiting is not None:
                self.waiting.begin(self.task)
            self.handle.wait()
            if self.waiting is not None:
                self.waiting.end(self.task)
            self.handle = None
            self.known = self.finish()
            self.keeps = None
        return self.known


@dataclass(frozen=True)
class Lines:
    """Groups of ranks that the program needs: of blocking collectives and of overlapped ones."""

    blocking: tuple[Line, ...]
    overlapped: tuple[Line, ...]
    links: tuple[tuple[int, int], ...]  # directed, between ranks


class Communicator:
    """The process groups of one rank, made by all ranks alike."""

    def __init__(self, lines: Lines, device: torch.device, timeout_s: float) -> None:
        self.rank, self.device = dist.get_rank(), device
        self.waiting = Waiting()
        self.is_nccl = dist.get_backend() == "nccl"
        through_host = device.type != "cpu" and not self.is_nccl
        self.home = (
            torch.device("cpu") if through_host else device
        )  # where tensors are on their way
        timeout = datetime.timedelta(seconds=timeout_s)
        self.groups: dict[tuple[Line, bool], Any] = {}
        for overlapped, each in ((False, lines.blocking), (True, lines.overlapped)):
            for line in sorted({tuple(sorted(line)) for line in each}):
                self.groups[line, overlapped] = dist.new_group(list(line), timeout=timeout)
        self.spare: dict[tuple[int, torch.dtype], list[T]] = {}  # flat memory that nothing uses
        self.links: dict[tuple[int, int], Any] = {}
        if self.is_nccl:
            for link in sorted(set(lines.links)):
                self.links[link] = dist.new_group(sorted(link), timeout=timeout)

    # Messages.

    def send(self, tensor: T, to: int, number: int) -> Pending:
        """Start to send a tensor; it must not change before `wait` returns."""
        whole = tensor.contiguous().to(self.home)
        group = self.links.get((self.rank, to))
        handle = dist.isend(whole, to, group=group, tag=0 if self.is_nccl else number)
        return Pending(handle, lambda: None, whole, self.waiting)

    def receive(self, like: T, source: int, number: int) -> Pending:
        """Start to receive into a tensor."""
        group = self.links.get((source, self.rank))
        here = like.to(self.home)
        handle = dist.irecv(here, source, group=group, tag=0 if self.is_nccl else number)
        return Pending(handle, lambda: _back(here, like), None, self.waiting)

    # Collectives among the ranks of a line, which all call them in the same order.

    def all_reduce(self, tensor: T, line: Line, overlapped: bool = False) -> Pending:
        """The sum over a line; `tensor` itself is overwritten."""
        here = tensor.to(self.home)
        handle = dist.all_reduce(here, group=self._group(line, overlapped), async_op=True)
        return Pending(handle, lambda: _back(here, tensor), None, self.waiting)

    def all_gather(
        self, tensor: T, sizes: Sequence[int], line: Line, overlapped: bool = False
    ) -> Pending:
        """The flat tensors of all members, of these sizes."""
        most = max(sizes)
        padded = tensor.reshape(-1)
        if padded.numel() < most:
            padded = torch.cat([padded, padded.new_zeros(most - padded.numel())])
        padded = padded.contiguous().to(self.home)
        whole = padded.new_empty(most * len(line))
        handle = gather(whole, padded, group=self._group(line, overlapped), async_op=True)
        spots = [k * most for k in _among_sorted(line)]
        return Pending(
            handle,
            lambda: _pieces(whole.to(self.device), spots, sizes),
            padded,
            self.waiting,
        )

    def reduce_scatter(
        self, parts: Sequence[Sequence[T]], line: Line, overlapped: bool = False
    ) -> Pending:
        """The sum over a line of what this rank keeps; per member the flat pieces of its part."""
        sizes = [sum(piece.numel() for piece in pieces) for pieces in parts]
        most, own = max(sizes), sizes[line.index(self.rank)]
        whole = self._flat(most * len(line), parts[0][0])
        for k, pieces, size in zip(_among_sorted(line), parts, sizes, strict=True):
            torch.cat(list(pieces), out=whole[k * most : k * most + size])
            whole[k * most + size : (k + 1) * most] = 0
        sent = whole.to(self.home)
        total = sent.new_empty(most)
        handle = scatter(total, sent, group=self._group(line, overlapped), async_op=True)

        def finish() -> T:
            self._give_back(whole)
            return total[:own].to(self.device)

        return Pending(handle, finish, sent, self.waiting)

    def all_to_all(
        self, parts: Sequence[T], sizes: Sequence[int], line: Line, overlapped: bool = False
    ) -> Pending:
        """Each member gets its part from every other; `sizes` are of what comes."""
        order = sorted(range(len(line)), key=lambda k: line[k])  # of the process group
        given = torch.cat([parts[k].reshape(-1) for k in order]).to(self.home)
        coming = [sizes[k] for k in order]
        taken = given.new_empty(sum(sizes))
        handle = dist.all_to_all_single(
            taken, given, coming, [parts[k].numel() for k in order],
            group=self._group(line, overlapped), async_op=True,
        )  # fmt: skip

        def finish() -> list[T]:
            pieces = dict(zip(order, taken.to(self.device).split(coming), strict=True))
            return [pieces[k] for k in range(len(line))]

        return Pending(handle, finish, given, self.waiting)

    def _flat(self, size: int, like: T) -> T:
        """Flat memory to send from. A CPU takes seven times as long to write what is new to it."""
        known = self.spare.get((size, like.dtype))
        return known.pop() if known else like.new_empty(size)

    def _give_back(self, tensor: T) -> None:
        """All of it was sent; GPUs have an allocator that keeps what is given back."""
        if self.device.type == "cpu":
            self.spare.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def _group(self, line: Line, overlapped: bool) -> Any:
        return self.groups[tuple(sorted(line)), overlapped]


def _back(here: T, tensor: T) -> T:
    """What came is in a tensor, where it did not come there by itself."""
    return tensor if here is tensor else tensor.copy_(here)


def _pieces(whole: T, spots: Sequence[int], sizes: Sequence[int]) -> list[T]:
    return [whole[at : at + size] for at, size in zip(spots, sizes, strict=True)]


def _among_sorted(line: Line) -> list[int]:
    """The place of each member among the ranks of its process group."""
    order = sorted(line)
    return [order.index(rank) for rank in line]
