"""States of mixers (`shoal.model.mixers`) in the engine: a kind of cache with a fixed size for each running sequence.

Memory is at most one state for each running sequence and mixer, and the same again while sequences change places. The
state of a sequence is a row of a batch. Sequences that decode together form one batch, which stays until they change.
A state stands for all its tokens, so no beginning of it can be copied: whole prompts and whole rows are shared only.
Mixers that attend to indexed keys have a state of one row that grows by a token at a time.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.engine.compute.scheduler import SequenceState
from shoal.model.mixers import Mixer, RowState, Run, side_by_side

OfSequence: TypeAlias = dict[Mixer, RowState]
"""States of one sequence, each of one row."""


class States:
    """State of each sequence in each mixer: a batch and the row in it."""

    def __init__(self) -> None:
        self._places: dict[int, dict[Mixer, tuple[RowState, int]]] = {}  # by id of the sequence

    def __len__(self) -> int:
        return len(self._places)

    def begun(self, mixer: Mixer, sequence: SequenceState) -> RowState:
        """Empty state for a sequence that begins."""
        state = RowState(mixer)
        self._places.setdefault(id(sequence), {})[mixer] = state, 0
        return state

    def together(self, mixer: Mixer, sequences: Sequence[SequenceState]) -> RowState:
        """State whose rows are those of the sequences; theirs are in it from now on."""
        parts = [self._places[id(sequence)][mixer] for sequence in sequences]
        if mixer.grows:
            return parts[0][0]
        state = RowState.joined(parts)
        for row, sequence in enumerate(sequences):
            self._places[id(sequence)][mixer] = state, row
        return state

    def exported(self, sequence: SequenceState) -> OfSequence:
        """Copy of a sequence's states."""
        places = self._places.get(id(sequence), {})
        return {
            mixer: deepcopy(state) if mixer.grows else RowState.joined([(state, row)])
            for mixer, (state, row) in places.items()
        }

    def restore(self, stored: OfSequence, sequence: SequenceState) -> None:
        """Gives a sequence a copy of exported states."""
        if stored:
            self._places[id(sequence)] = {mixer: (deepcopy(state), 0) for mixer, state in stored.items()}

    def forget(self, sequence: SequenceState) -> None:
        """Drops a sequence's states."""
        self._places.pop(id(sequence), None)


class MixedRows:
    """Rows of one step: sequences that decode, then chunks of known tokens."""

    def __init__(
        self, states: States, decoding: Sequence[SequenceState], chunks: Sequence[tuple[SequenceState, int, int]]
    ) -> None:
        """A chunk has a sequence, the position of its first token, and its length."""
        self._states, self._decoding, self._chunks = states, decoding, chunks
        self._together: dict[Mixer, RowState] = {}

    def mix(self, mixer: Mixer, inputs_T: Sequence[Tensor], run: Run) -> Sequence[Tensor]:
        """Mixes the tokens of each sequence, and carries its state on."""
        parts = []
        count = len(self._decoding)
        if mixer.grows:
            for at, sequence in enumerate(self._decoding):
                state = self._states.together(mixer, [sequence])
                parts.append(_ran(run, inputs_T, slice(at, at + 1), state))
        elif count:
            if mixer not in self._together:
                self._together[mixer] = self._states.together(mixer, self._decoding)
            outs = run([x[:count, None] for x in inputs_T], self._together[mixer])
            parts.append(tuple(out[:, 0] for out in outs))
        for sequence, start, length in self._chunks:
            state = self._states.together(mixer, [sequence]) if start else self._states.begun(mixer, sequence)
            parts.append(_ran(run, inputs_T, slice(count, count + length), state))
            count += length
        return side_by_side(parts)


def _ran(run: Run, inputs_T: Sequence[Tensor], tokens: slice, state: RowState) -> tuple[torch.Tensor, ...]:
    return tuple(out[0] for out in run([x[None, tokens] for x in inputs_T], state))
