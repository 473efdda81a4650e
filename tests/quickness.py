"""How long a call takes, where a test holds it against a limit.

One measurement tells little: the collector walks all that the tests before have made, another
process has the caches, a worker compiles in a thread. The least of several is what the call needs.
"""

import time
from collections.abc import Callable


def least_cpu_s(call: Callable[[], object], limit_s: float = 0.0, tries: int = 5) -> float:
    """CPU seconds of the fastest of `tries` calls; the first one below `limit_s` is enough."""
    least = float("inf")
    for _ in range(tries):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
        if least < limit_s:
            break
    return least
