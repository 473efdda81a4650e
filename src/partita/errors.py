"""Every error a user can meet.

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
"""


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
