"""What every table of settings is."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MOST = 10**9
"""The largest number that a setting may be; more is a slip of the keyboard, and too much for what computes with it."""
UNBOUNDED = ("seed",)


class Section(BaseModel):
    """A table of settings: frozen, closed to unknown keys, and taking nothing for what it is not."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int | float) and value > MOST and info.field_name not in UNBOUNDED:
            raise ValueError(f"expected at most {MOST}, got {value}")
        return value
