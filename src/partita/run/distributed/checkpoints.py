"""Checkpoints: whole tensors under the names of the plain module, so that any plan can read them.

    model.<name>            parameters and buffers
    optim.<name>.<state>    states of the optimizer, each as large as its parameter, or a number
    run                     how many steps were taken

`torch.distributed.checkpoint` writes and reads; each tensor is put together by the first rank of a
stage that holds it and written there. Everything goes into a temporary folder beside the target,
which is renamed when all ranks have written: a folder that is there is complete, and a full disk or
a killed rank leaves the last one as it was.
"""

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from partita.errors import FileError, RunError
from partita.meaning import Value
from partita.run.distributed.faults import is_lost
from partita.run.distributed.held import StageState, cut, joined
from partita.run.local.shards import places

if TYPE_CHECKING:
    from partita.run.distributed.walk import RankWalk

T = torch.Tensor
STEP = re.compile(r"step-(\d{8})")
KEPT = 2  # checkpoints of a run that stay
NO_ROOM = ("No space left", "Disk quota exceeded", "unexpected pos")
LEAST_ROOM = 2**16  # bytes: with less a disk is full


def save(walk: "RankWalk", names: dict[str, list[str]], steps: int, path: Path) -> None:
    """Write a checkpoint; all ranks call it. `names` are the module's, by those of the graph."""
    own = _own_tensors(walk, names)
    if dist.get_rank() == 0:
        own["run.steps"] = torch.tensor(steps)
    partial = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    try:
        with _quiet():
            write_tensors(own, checkpoint_id=str(partial))
    except BaseException as error:
        full = is_full(error, path.parent)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt) or (is_lost(error) and not full):
            raise
        raise RunError(
            f"the checkpoint {path} could not be written: {_reason(error, full)}; "
            "what was there before is untouched"
        ) from None
    dist.barrier()
    if dist.get_rank() == 0:
        _replace(partial, path)
    dist.barrier()


def is_full(error: BaseException, folder: Path) -> bool:
    """Was there no room? PyTorch's own writer only notices that it is not where it should be."""
    if any(word in str(error) for word in NO_ROOM):
        return True
    try:
        return shutil.disk_usage(folder).free < LEAST_ROOM
    except OSError:
        return False


def _reason(error: BaseException, full: bool) -> str:
    text = str(error)
    if full:
        return "the disk is full; make room, or save elsewhere"
    return (text.strip().splitlines() or [type(error).__name__])[-1][:200]


def _replace(partial: Path, path: Path) -> None:
    """Put a complete folder into its place; the old one goes only when the new one is there."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _own_tensors(walk: "RankWalk", names: dict[str, list[str]]) -> dict[str, Any]:
    """Whole tensors that this rank writes: those of stages that it is the first rank of."""
    own: dict[str, Any] = {}
    written: set[str] = set()
    for number, stage in enumerate(walk.stages):
        state = walk.states.get(number)
        parts = None if state is None else _parts(state)
        first = walk.rank_of[stage.mesh.devices[0]]
        gathered = _gather(walk, number, parts, first)
        for name in sorted({*(() if gathered is None else next(iter(gathered.values())))}):
            assert gathered is not None, "the first rank of a stage gathers it"
            if name in written:
                continue
            tensor, key = _whole(walk, number, name, gathered), name.split("\0")
            if len(key) > 1:
                own[f"optim.{names[key[0]][0]}.{key[1]}"] = tensor
            else:
                own.update({f"model.{each}": tensor for each in names.get(name, ())[:1]})
        held = [sorted(next(iter(gathered.values())))] if gathered else [[]]
        dist.broadcast_object_list(held, src=first)
        written.update(held[0])
    return own


def _parts(state: StageState) -> dict[str, tuple[Value, T]]:
    """What a rank holds of a stage: parameters, buffers, and states of the optimizer."""
    parts: dict[str, tuple[Value, T]] = {}
    for name, stored in state.stored.items():
        parts[name] = (stored.value, stored.tensor.detach().cpu())
        known: dict[str, Any] = {}
        if state.optimizer is not None and stored.part is not None:
            known = state.optimizer.state.get(stored.part, {})
        for key, value in known.items():
            where = Value(name, stored.value.layout, flat=stored.flat)
            tensor = (
                value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)
            )
            parts[f"{name}\0{key}"] = (where, tensor)
    return parts


def _gather(
    walk: "RankWalk", number: int, parts: Any, first: int
) -> dict[tuple[int, ...], dict[str, tuple[Value, T]]] | None:
    """The parts of all ranks of a stage, on its first rank."""
    mesh = walk.stages[number].mesh
    if len(mesh.devices) == 1:
        return {(): parts} if dist.get_rank() == first else None
    world = dist.get_world_size()
    everyone: list[Any] | None = [None] * world if dist.get_rank() == first else None
    dist.gather_object(parts, everyone, dst=first)
    if everyone is None:
        return None
    return {mesh.place(device): everyone[walk.rank_of[device]] for device in mesh.devices}


def _whole(
    walk: "RankWalk", number: int, name: str,
    gathered: dict[tuple[int, ...], dict[str, tuple[Value, T]]],
) -> T:  # fmt: skip
    axes = walk.stages[number].mesh.axes
    first = next(iter(gathered.values()))[name]
    tensor = name.split("\0")[0]
    own_size = walk.states[number].stored[tensor]
    if first[1].ndim == 0 and own_size.tensor.ndim > 0:
        return first[1]  # a number, such as the count of steps
    parts = {place: held[name][1] for place, held in gathered.items()}
    if axes == () or len(gathered) == 1:
        place = next(iter(places(axes)))
        parts = {place: next(iter(parts.values()))}
    return joined(parts, first[0], walk.shapes.shape(tensor), axes, walk.shapes.num_gates(tensor))


def load(walk: "RankWalk", names: dict[str, list[str]], path: Path) -> int:
    """Read a checkpoint of this model, whatever plan wrote it; the number of its steps."""
    known = metadata(path)
    for state in walk.states.values():
        for name, stored in state.stored.items():
            if name not in names:  # a constant, or a buffer that is in no state dict
                continue
            for each in names[name]:
                if f"model.{each}" in known:
                    whole = _read(path, known, f"model.{each}")
                    _check(whole, walk.shapes.shape(name), each, path)
                    gates = walk.shapes.num_gates(name)
                    own = cut(whole, stored.value, state.axes, state.place, gates)
                    with torch.no_grad():
                        stored.tensor.copy_(own.reshape(stored.tensor.shape))
                    break
            else:
                raise FileError(
                    f"has no {names[name][0]}", fix="it belongs to another model",
                    file=str(path),
                )  # fmt: skip
            _load_states(walk, state, name, names, path, known)
    return int(_read(path, known, "run.steps"))


def _load_states(
    walk: "RankWalk", state: StageState, name: str, names: dict[str, list[str]], path: Path,
    known: dict[str, Any],
) -> None:  # fmt: skip
    stored = state.stored[name]
    if state.optimizer is None or stored.part is None:
        return
    prefix = f"optim.{names[name][0]}."
    for key in [key for key in known if key.startswith(prefix)]:
        whole = _read(path, known, key)
        where = Value(name, stored.value.layout, flat=stored.flat)
        if whole.ndim == len(walk.shapes.shape(name)) and tuple(whole.shape) == walk.shapes.shape(
            name
        ):
            gates = walk.shapes.num_gates(name)
            whole = cut(whole, where, state.axes, state.place, gates).reshape(stored.part.shape)
            whole = whole.to(stored.part.device).clone()
        state.optimizer.state[stored.part][key.removeprefix(prefix)] = whole


def _check(whole: T, shape: tuple[int, ...], name: str, path: Path) -> None:
    if tuple(whole.shape) != shape:
        raise FileError(
            f"{name} is {list(whole.shape)} there and {list(shape)} in the model",
            fix="it belongs to another model",
            file=str(path),
        )


def metadata(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by key."""
    try:
        with _quiet():
            return dict(FileSystemReader(str(path)).read_metadata().state_dict_metadata)
    except Exception as error:
        raise FileError(
            f"is no checkpoint ({type(error).__name__})",
            fix="give the folder that engine.save wrote",
            file=str(path),
        ) from None


def _read(path: Path, known: dict[str, Any], key: str) -> T:
    if key not in known:
        raise FileError(f"has no {key}", fix="it belongs to another model", file=str(path))
    item = known[key]
    wanted = {key: torch.empty(tuple(item.size), dtype=item.properties.dtype)}
    with _quiet():
        read_tensors(wanted, checkpoint_id=str(path), no_dist=True)
    return wanted[key]


def read_plain(path: str | Path) -> dict[str, T]:
    """The state dict of the plain module in a checkpoint."""
    folder = Path(path)
    known = metadata(folder)
    wanted = {
        key: torch.empty(tuple(item.size), dtype=item.properties.dtype)
        for key, item in known.items()
        if key.startswith("model.")
    }
    with _quiet():
        read_tensors(wanted, checkpoint_id=str(folder), no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in wanted.items()}


# The checkpoints of a run, one folder for each step that was saved.


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder."""
    if not folder.is_dir():
        return None
    there = [each for each in folder.iterdir() if STEP.fullmatch(each.name)]
    return max(there, key=lambda each: each.name, default=None)


def place_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"step-{step:08d}"


def drop_old(folder: Path) -> None:
    """Keep the newest checkpoints only."""
    there = sorted(each for each in folder.iterdir() if STEP.fullmatch(each.name))
    for each in there[:-KEPT]:
        shutil.rmtree(each, ignore_errors=True)
