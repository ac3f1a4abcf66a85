"""How a command of Fencepost's ends by an error of its own: one line that says what to do, and an exit code. Never a traceback."""

import sys

from fencepost.errors import FencepostError, InvariantViolated

__all__ = ["tell"]


def tell(error: Exception) -> int:
    """Tell it on the standard error; the exit code: 2 for a wrong set-up, 1 for a fault that a restart may mend. Of an error that
    is not Fencepost's only the class is told: a message may quote rows."""
    ours = isinstance(error, FencepostError)
    sys.stderr.write(f"fencepost: {error if ours else type(error).__name__}\n")
    sys.stderr.flush()
    return 2 if ours and not isinstance(error, InvariantViolated) else 1
