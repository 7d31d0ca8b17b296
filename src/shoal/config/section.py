"""Base class of the tables of settings."""

from typing import Annotated, Self, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST = 10**9
"""The largest number of a setting; a larger one is a typing error and would overflow computations."""
UNBOUNDED = ("seed",)


class Section(BaseModel):
    """A table of settings: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def sections(cls) -> "dict[str, type[Section]]":
        """Sections within this one, by name."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: object) -> object:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and bool not in (field.annotation, *get_args(field.annotation)):
                raise ValueError(f"{name}: expected no true or false, got {str(value).lower()}")
        return values

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        for name, value in self:
            if isinstance(value, int | float) and value > MOST and name not in UNBOUNDED:
                raise ValueError(f"{name}: expected at most {MOST}, got {value}")
        return self


OwnName: TypeAlias = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
"""`module:name` or `file.py:name`, the user's own code."""
