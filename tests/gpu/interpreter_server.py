"""Forks a process for every request, with PyTorch and Triton's interpreter imported already.

    TRITON_INTERPRET=1 python -m interpreter_server

A request is a line of JSON: the `code` to run, `settings` of the environment, the files `out` and
`err` for what it prints. The answer is a line with its exit code.
"""

import json
import os
import signal
import sys
import traceback
from dataclasses import replace

import rtasks_cases  # noqa: F401
import torch.export._trace  # noqa: F401
from triton.runtime.interpreter import interpreter_builder

import partita.gpu.decode.step
import partita.gpu.rtasks.region
import partita.gpu.streams.ways  # noqa: F401

LIMIT_S = 300

# The interpreter does every sum and product of integers once more, in 64 bits, and compares; what
# comes out is looked at in debug mode only. That is half of the time of small kernels.
if not interpreter_builder.options.debug:
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def child(request: dict) -> None:
    """Runs the code of a request and ends this process."""
    code = 1
    try:
        signal.alarm(LIMIT_S)
        for name, number in (("out", 1), ("err", 2)):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
        os.environ.update(request["settings"])
        exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    process = os.fork()
    if not process:
        child(json.loads(line))
    _, status = os.waitpid(process, 0)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
    sys.stdout.flush()
