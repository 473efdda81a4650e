"""Every error a user can meet, and those on the way that need not end the answer.

    PartitaError
    ├── InputError            what was given must change (exit code 2)
    │   ├── FileError         cannot be read or written, or is not the format it should be
    │   ├── GraphError        a model graph that is not one: cycle, dangling tensor, bad size
    │   ├── ModelError        no such model, or an option it does not have
    │   ├── CaptureError      a PyTorch model that cannot be captured as it is
    │   ├── ClusterError      a machine description that cannot exist
    │   ├── ProblemError      a search problem whose numbers make no sense
    │   ├── ProgramError      tasks and lanes that cannot be run
    │   └── PlanError         a plan that does not belong to this model or machine
    ├── RunError              a run on several ranks ended: rank, task, cause (exit code 1)
    ├── MissingExtraError     an optional package is needed (exit code 2)
    └── VerificationError     the verifier refused a result (exit code 1)

Infeasible and out-of-time are results with a sentence, not errors.

One candidate, piece of advice or picture that fails is one line (`Attempts`): the answer does not
hang on it. A job makes many things on its way: plans that are simulated, sentences of advice,
drawings. Each is an attempt. What goes wrong in one is a mistake of ours, or of a model nobody
thought of; it is logged in one line, and the rest is shown. Where everything has failed there is no
rest: then the first error is the answer.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar


class PartitaError(Exception):
    """Base of all errors a user can meet; `exit_code` is what the command line returns."""

    exit_code = 2


class InputError(PartitaError):
    """Something that was given must change.

    One sentence built from its parts: `file: field: what was found; what to do`.
    Readers raise it with the field; whoever knows the file adds that with `within`.
    """

    def __init__(self, found: str, *, fix: str = "", field: str = "", file: str = "") -> None:
        self.found = found
        self.fix = fix
        self.field = field
        self.file = file
        super().__init__(str(self))

    def __str__(self) -> str:
        where = "".join(f"{part}: " for part in (self.file, self.field) if part)
        return f"{where}{self.found}" + (f"; {self.fix}" if self.fix else "")

    def within(self, file: str) -> "InputError":
        """The same error, of the same class, naming the file it was found in."""
        return type(self)(self.found, fix=self.fix, field=self.field, file=file)


class FileError(InputError):
    """A file cannot be read or written, or is not the format it should be."""


class GraphError(InputError):
    """A model graph that is not one."""


class ModelError(InputError):
    """No such model, or an option it does not have."""


class CaptureError(InputError):
    """A PyTorch model does something that a captured graph cannot hold."""


class ClusterError(InputError):
    """A machine description that cannot exist."""


class ProblemError(InputError):
    """A search problem whose numbers make no sense."""


class ProgramError(InputError):
    """Tasks and lanes that cannot be run."""


class PlanError(InputError):
    """A plan that does not belong to this model or machine, or contradicts itself."""


class RunError(PartitaError):
    """A run on several ranks ended: it names the rank, its task and the cause."""

    exit_code = 1


class MissingExtraError(PartitaError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed; "
            f"install it with: pip install 'partita[{extra}]'"
        )


class VerificationError(PartitaError):
    """The verifier refused a result; `violations` lists why."""

    exit_code = 1

    def __init__(self, violations: tuple[str, ...]) -> None:
        self.violations = violations
        more = f" (and {len(violations) - 3} more)" if len(violations) > 3 else ""
        super().__init__("not verified: " + "; ".join(violations[:3]) + more)


T = TypeVar("T")

log = logging.getLogger("partita")


@dataclass
class Attempts:
    """What failed so far."""

    errors: list[Exception] = field(default_factory=list)

    def __call__(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` gives; None, and a line, where it fails."""
        try:
            return make()
        except Exception as error:
            self.errors.append(error)
            log.warning("%s is left out: %s", what, in_words(error), extra={"failure": error})
            return None

    def refuse_if_all_failed(self, anything: object) -> None:
        """Raise the first error where nothing else is left to show."""
        if not anything and self.errors:
            raise self.errors[0]


def in_words(error: Exception) -> str:
    """An error in one line, with its class where the text alone says little."""
    text = str(error).split("\n", 1)[0]
    return text if isinstance(error, PartitaError) else f"{type(error).__name__}: {text}"
