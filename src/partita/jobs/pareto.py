"""Which of several plans no other one beats: the front of time against memory."""

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """The points (by number) that no other one equals or beats in both; by the first figure.

    Of equal points the first stands for all.
    """
    order = sorted(range(len(points)), key=lambda i: (*points[i], i))
    front: list[int] = []
    for number in order:
        if not front or points[number][1] < points[front[-1]][1]:
            front.append(number)
    return tuple(front)
