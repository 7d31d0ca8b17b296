"""What every table of settings is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of settings: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
