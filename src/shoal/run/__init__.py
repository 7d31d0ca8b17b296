"""A run joins all rooms: `plan` checks, `training` builds and takes down the parts, `loop` trains."""
