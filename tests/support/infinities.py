"""Values that hold an infinity or a NaN: in each kind of place where pydantic would write null, or what no JSON has."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field, field_serializer

__all__ = ["IN_MODELS", "IN_PLAIN_VALUES", "INFINITE", "NAN", "Constants", "Measured", "Texts"]

INFINITE: Final = float("inf")
NAN: Final = float("nan")


class Measured(BaseModel):
    """Nothing is chosen of how its floats are written."""

    value: float | None = Field(default=None, serialization_alias="theValue")
    anything: Any = None
    parts: list[float] = []
    named: Mapping[str, float] = {}


class Texts(BaseModel):
    """Its author writes them as text."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float


class Constants(BaseModel):
    """Its author writes what is no JSON."""

    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


class Around(BaseModel):
    """A field that is well beside one that is not."""

    text: Texts
    measured: Measured


class Whole(RootModel[float]): ...


class Computed(BaseModel):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def value(self) -> float:
        return NAN


class Scaled(BaseModel):
    value: float

    @field_serializer("value")
    def scaled(self, value: float) -> Any:
        return value * 2


class Level(Enum):
    HIGHEST = INFINITE
    BOTH = (1.0, INFINITE)


class Sets(BaseModel):
    """Each dump of one has an order of its own."""

    values: set[float]
    frozen: frozenset[float | None] = frozenset()
    anything: frozenset[Any] = frozenset()


@dataclass
class Pair:
    left: int
    right: float


#: By what is in the name. Each of them is a model.
IN_MODELS: Final[dict[str, BaseModel]] = {
    "a field": Measured(value=INFINITE),
    "a field below nothing": Measured(value=-INFINITE, anything=None),
    "a field of any type": Measured(anything=NAN),
    "within a field of any type": Measured(anything={"a": [1, (2, NAN)]}),
    "a list of floats": Measured(parts=[1.0, NAN]),
    "a mapping": Measured(named={"a": INFINITE}),
    "beside text": Around(text=Texts(value=INFINITE), measured=Measured(value=NAN)),
    "a model within any": Measured(anything=[Measured(value=INFINITE)]),
    "a root": Whole(INFINITE),
    "a computed field": Computed(),
    "a serializer": Scaled(value=1e308),
    "an enum": Measured(anything=Level.HIGHEST),
    "an enum of several": Measured(anything=Level.BOTH),
    **{f"a set of {number}": Sets(values={INFINITE, *(one / 7 for one in range(number))}) for number in (1, 5, 30, 100)},
    "a set of tuples": Sets(values=set(), anything=frozenset({(1, INFINITE), (1, 2.0)})),
    "a set of sets": Sets(values=set(), anything=frozenset({frozenset({NAN}), frozenset({1})})),
    "a set of enums": Sets(values=set(), anything=frozenset({Level.HIGHEST, 1})),
    "a frozen set": Sets(values=set(), frozen=frozenset({None, NAN, *(one / 7 for one in range(30))})),
    "a dataclass": Measured(anything=Pair(1, INFINITE)),
    "a name within any": Measured(anything={NAN: 1}),
    "constants": Constants(value=INFINITE),
    "constants within": Measured(anything=[Constants(value=NAN)]),
}

#: What is no model, and holds one at the most.
IN_PLAIN_VALUES: Final[dict[str, object]] = {
    "infinity": INFINITE,
    "NaN": NAN,
    "a list": [1.0, -INFINITE],
    "a dict": {"a": {"b": NAN}},
    "a tuple": (1, (2, INFINITE)),
    "a name": {NAN: 1},
    "among nothing": [None, {"a": None, "b": INFINITE}],
}
