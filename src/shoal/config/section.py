"""What every table of settings is."""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

MOST = 10**9
"""The largest number that a setting may be; more is a slip of the keyboard, and too much for what computes with it."""
UNBOUNDED = ("seed",)


class NoTruth(ValueError):
    """True or false for a setting that is neither, which would be taken for 1 or 0."""

    def __init__(self, key: str, value: bool) -> None:
        super().__init__(f"expected no true or false, got {str(value).lower()}")
        self.key = key


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
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and cls.model_fields[key].annotation is not bool:
                raise NoTruth(key, value)
        return values

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int | float) and value > MOST and info.field_name not in UNBOUNDED:
            raise ValueError(f"expected at most {MOST}, got {value}")
        return value


OwnName: TypeAlias = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
"""`module:name` or `file.py:name`, the user's own code."""
