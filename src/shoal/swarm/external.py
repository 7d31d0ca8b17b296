"""The credit rule sets how peers' answers are reinforced. Pure.

The gradient of a worse external answer pushes down text that this node might never write. With stacked models, leaving
such answers out was better in each of three seeds (experiments/sapo_stacked).
"""

from collections.abc import Sequence
from dataclasses import replace

from shoal.config import Credit
from shoal.types import Sample


def external_rows(rows: Sequence[Sample], credit: Credit) -> tuple[Sample, ...]:
    """Rows of an external group: `group` keeps them as they are (SAPO), `group_drop` sets negative advantages to 0.

    The tokens of a row without advantage still count in the loss's denominator.
    """
    if credit == "group":
        return tuple(rows)
    return tuple(replace(row, advantages=tuple(max(a, 0.0) for a in row.advantages)) for row in rows)
