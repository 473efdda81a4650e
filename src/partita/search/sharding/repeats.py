"""What is said twice in a problem: equal rows and columns of matrices, equal choices of an op.

Rows are hashed and compared with the first row of the same hash, so that equal ones are found in
one reading and unequal ones never taken for equal. O(cells).
"""

import numpy as np
import numpy.typing as npt

from partita.compiled import compiled
from partita.problems.sharding import Floats, Ints
from partita.search.sharding.network import SMALL, Flags, ShardingNetwork

Hashes = npt.NDArray[np.uint64]

SPREAD = 0x9E3779B97F4A7C15  # an odd number of 64 bits, half of them ones


def compact(cells: Floats, sides: Ints, class_of: Ints, num_classes: Ints) -> int:
    """Take repeated rows and columns out of tables that follow each other, in place.

    `sides` are the rows and columns of each table; those that are left go to `num_classes`, and
    `class_of` says which one each row and column became. Returns how many cells are left.
    """
    weights = np.arange(1, 2 * sides.max(), 2, dtype=np.uint64) * np.uint64(SPREAD)
    count: int = _compact(cells.view(np.uint64), sides, weights, class_of, num_classes)
    return count


@compiled(small=20 * SMALL)
def _compact(bits: Hashes, sides: Ints, weights: Hashes, class_of: Ints, num_classes: Ints) -> int:
    read = end = place = 0
    for table in range(len(sides) // 2):
        rows, columns = sides[2 * table], sides[2 * table + 1]
        before = bits[read : read + rows * columns].reshape(rows, columns)
        row_class, column_class = class_of[place : place + rows], class_of[place + rows :]
        rows_kept = _different_rows(before, weights, row_class)
        columns_kept = _different_columns(before, rows_kept, weights, column_class)
        read += rows * columns
        place += rows + columns
        num_classes[2 * table], num_classes[2 * table + 1] = len(rows_kept), len(columns_kept)
        for row in rows_kept:  # never writes ahead of where it reads
            for column in columns_kept:
                bits[end] = before[row, column]
                end += 1
    return end


def _different_rows_in_numpy(bits: Hashes, weights: Hashes, number: Ints) -> Ints:
    hashes = (_mixed(bits) * weights[: bits.shape[1]]).sum(axis=1, dtype=np.uint64)  # type: ignore[arg-type]
    first = _first_with_hash(hashes)
    differs = (bits != bits[first]).any(axis=1)
    first[differs] = np.flatnonzero(differs)
    return _numbered(first, number)


@compiled(plain=_different_rows_in_numpy)
def _different_rows(bits: Hashes, weights: Hashes, number: Ints) -> Ints:
    """Number the different rows; where each is first."""
    hashes = np.zeros(bits.shape[0], np.uint64)
    for row in range(bits.shape[0]):
        total = np.uint64(0)
        for column in range(bits.shape[1]):
            total += _mixed(bits[row, column]) * weights[column]
        hashes[row] = total
    first = _first_with_hash(hashes)
    for row in range(len(first)):
        for column in range(bits.shape[1]):
            if bits[row, column] != bits[first[row], column]:
                first[row] = row  # two rows of one hash: both are kept
                break
    return _numbered(first, number)


def _different_columns_in_numpy(bits: Hashes, rows: Ints, weights: Hashes, number: Ints) -> Ints:
    some = bits[rows]
    hashes = (_mixed(some) * weights[rows][:, None]).sum(axis=0, dtype=np.uint64)  # type: ignore[arg-type]
    first = _first_with_hash(hashes)
    differs = (some != some[:, first]).any(axis=0)
    first[differs] = np.flatnonzero(differs)
    return _numbered(first, number)


@compiled(plain=_different_columns_in_numpy)
def _different_columns(bits: Hashes, rows: Ints, weights: Hashes, number: Ints) -> Ints:
    """Number the columns that differ in these rows; where each is first."""
    hashes = np.zeros(bits.shape[1], np.uint64)
    for row in rows:
        for column in range(bits.shape[1]):
            hashes[column] += _mixed(bits[row, column]) * weights[row]
    first = _first_with_hash(hashes)
    for row in rows:
        for column in range(bits.shape[1]):
            if bits[row, column] != bits[row, first[column]]:
                first[column] = column
    return _numbered(first, number)


@compiled()
def _mixed(bits: np.uint64) -> np.uint64:
    """Round numbers have zeros in their lower bits; bring the upper ones down."""
    return bits ^ (bits >> np.uint64(32))


def _first_with_hash_in_python(hashes: Hashes) -> Ints:
    seen: dict[int, int] = {}
    return np.array(
        [seen.setdefault(each, at) for at, each in enumerate(hashes.tolist())], np.int64
    )


@compiled(plain=_first_with_hash_in_python)
def _first_with_hash(hashes: Hashes) -> Ints:
    """For each entry the first one with the same hash, by open addressing."""
    size = 2
    while size < 2 * len(hashes):
        size *= 2
    slots = np.full(size, -1, np.int64)
    first = np.empty(len(hashes), np.int64)
    for index in range(len(hashes)):
        slot = np.int64((_mixed(hashes[index]) * np.uint64(SPREAD)) >> np.uint64(32)) % size
        while slots[slot] >= 0 and hashes[slots[slot]] != hashes[index]:
            slot = (slot + 1) % size
        if slots[slot] < 0:
            slots[slot] = index
        first[index] = slots[slot]
    return first


@compiled()
def _numbered(first: Ints, number: Ints) -> Ints:
    """Number the entries that are first themselves, and give the others their first one's."""
    kept = np.empty(len(first), np.int64)
    count = 0
    for index in range(len(first)):
        if first[index] == index:
            kept[count] = index
            number[index] = count
            count += 1
        else:
            number[index] = number[first[index]]
    return kept[:count].copy()


def _hashes_of_choices_in_numpy(class_of: Ints, class_at: Ints, count: int) -> Hashes:
    hashes = np.zeros(count, np.uint64)
    for at in class_at:
        hashes = (_mixed(hashes) + class_of[at : at + count].astype(np.uint64)) * np.uint64(SPREAD)  # type: ignore[arg-type]
    return hashes


@compiled(plain=_hashes_of_choices_in_numpy)
def _hashes_of_choices(class_of: Ints, class_at: Ints, count: int) -> Hashes:
    """Of the classes that each choice of an op belongs to, edge by edge."""
    hashes = np.zeros(count, np.uint64)
    for at in class_at:
        for x in range(count):
            hashes[x] = (_mixed(hashes[x]) + np.uint64(class_of[at + x])) * np.uint64(SPREAD)
    return hashes


@compiled(small=SMALL)
def rule_out_equal_choices(network: ShardingNetwork, alive: Flags) -> None:
    """Of choices that are of the same classes, only the first of the cheapest lives on."""
    class_of = network.tables.class_of
    for op in range(len(network.first) - 1):
        costs = network.costs[network.first[op] : network.first[op + 1]]
        lives = alive[network.first[op] : network.first[op + 1]]
        near = network.near[network.near_at[op] : network.near_at[op + 1]]
        class_at = network.tables.class_at[near]
        first = _first_with_hash(_hashes_of_choices(class_of, class_at, len(costs)))
        cheapest = np.arange(len(costs))  # of the choices so far, per first one
        for x in range(len(costs)):
            other = cheapest[first[x]]
            same = other != x
            for at in class_at:
                same = same and class_of[at + x] == class_of[at + other]
            if same and costs[x] < costs[other]:
                cheapest[first[x]] = x
                lives[other] = False
            elif same:
                lives[x] = False
