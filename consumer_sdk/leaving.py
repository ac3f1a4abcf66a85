"""The ways in which a workflow's attempt ends before its workflow does."""

from dataclasses import dataclass

from fencepost.workflows import Workflow

__all__ = ["Continuing", "GivenBack", "Leaving", "Parked", "Way"]


@dataclass(frozen=True, kw_only=True)
class GivenBack:
    """The run goes on after so many seconds, with whoever claims it then."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Parked:
    """The run goes on when a person resumes it. ``code`` says why, without values."""

    code: str


@dataclass(frozen=True, kw_only=True)
class Continuing:
    """The run ends, and the next of its lineage begins: ``workflow`` with ``input``, as JSON."""

    workflow: Workflow
    input: bytes


Way = GivenBack | Parked | Continuing


class Leaving(Exception):
    """Takes a workflow's function out of its body; its author lets it pass."""

    def __init__(self, way: Way) -> None:
        super().__init__("the workflow leaves this attempt; let this pass")
        self.way = way
