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
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, interpreter_builder

import partita.gpu.decode.step
import partita.gpu.rtasks.region
import partita.gpu.streams.ways  # noqa: F401

LIMIT_S = 300

# The interpreter does every sum and product of integers once more, in 64 bits, and compares; what
# comes out is looked at in debug mode only. That is half of the time of small kernels.
if not interpreter_builder.options.debug:
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)

# Every call of a device function looks through all of Triton's language for what is to be replaced
# by the interpreter: a quarter of the time of small kernels. Once for each launch is enough, which
# is where it is put back.
replaced_for: set[InterpretedFunction] = set()
launch, call = GridExecutor.__call__, InterpretedFunction.__call__


def launched(self: GridExecutor, *args: object, **kwargs: object) -> None:
    """A launch, before which nothing is replaced."""
    replaced_for.clear()
    launch(self, *args, **kwargs)


def called(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
    """A device function; what it needs is replaced when the launch first calls it."""
    if self not in replaced_for:
        replaced_for.add(self)
        return call(self, *args, **kwargs)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


GridExecutor.__call__, InterpretedFunction.__call__ = launched, called

# It also makes a table of all types whenever it asks for one.
known_dtypes: dict[str, object] = {}
dtype_of = interpreter._get_np_dtype


def known_dtype(dtype: tl.dtype) -> object:
    """numpy's type for one of Triton, looked up once."""
    name = (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype).name
    if name not in known_dtypes:
        known_dtypes[name] = dtype_of(dtype)
    return known_dtypes[name]


interpreter._get_np_dtype = known_dtype


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
