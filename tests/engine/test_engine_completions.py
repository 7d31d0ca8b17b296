"""The text of completions: the same in whatever pieces the tokens come, up to the first stop text."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shoal.engine.completions import CompletionRequest, Text, TextChoice
from shoal.engine.detokenizer import WINDOW_TOKENS, Detokenizer
from shoal.engine.request import Request
from shoal.engine.token_stream import Part
from shoal.run.demo_model.architecture import pair_tokenizer
from shoal.types import FinishReason, Sampling

SPECIALS = ["<s>", "<end>"]


def byte_level() -> PreTrainedTokenizerFast:
    """A token per byte, some of several, two specials and a token of its own text, which was added later."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ã", "©"), ("â", "Ĥ"), ("âĤ", "¬"), ("a", "b"), ("¬", "b")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("€ tool", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def words() -> PreTrainedTokenizerFast:
    """Tokens of which the very first loses the space that it begins with."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "▁", "▁a", "▁▁", "b", ".", "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def tokenizers(tiny_model_dir: Path) -> list[PreTrainedTokenizerFast]:
    return [byte_level(), words(), AutoTokenizer.from_pretrained(tiny_model_dir), pair_tokenizer()]


fractions = st.lists(st.floats(0, 1), max_size=12)
euros = ["â", "Ĥ", "¬", "âĤ", "âĤ¬", "Ã", "©", "a"]


def ids_of(tokenizer: PreTrainedTokenizerFast, drawn: Sequence[int]) -> list[int]:
    """Token ids for any numbers; of the byte-level tokenizer many are parts of characters."""
    parts = [token for token in map(tokenizer.convert_tokens_to_ids, euros) if token is not None]
    return [
        parts[i // 2 % len(parts)] if i % 2 and len(parts) == len(euros) else i // 2 % len(tokenizer) for i in drawn
    ]


def ends_of(cuts: Sequence[float], count: int) -> list[int]:
    """Where pieces of so many tokens end; the last is the end of all."""
    return [*sorted({round(cut * count) for cut in cuts} - {0, count}), count]


@settings(max_examples=300)
@example(which=1, drawn=[2 * 4] * 8 + [2 * 7] * 8 + [2 * 2], cuts=None)  # words, then nothing but specials, then a word
@given(which=st.integers(0, 3), drawn=st.lists(st.integers(0, 10**6), max_size=60), cuts=st.none() | fractions)
def test_the_pieces_joined_are_the_text_of_all_tokens(
    which: int, drawn: list[int], cuts: list[float] | None, tokenizers: list[PreTrainedTokenizerFast]
) -> None:
    tokenizer = tokenizers[which]
    ids = ids_of(tokenizer, drawn)
    detokenizer = Detokenizer(tokenizer, ids)
    ends = range(1, len(ids) + 1) if cuts is None else ends_of(cuts, len(ids))
    whole, text = tokenizer.decode(ids, skip_special_tokens=True), ""
    for end in ends:
        text += detokenizer.more(end)
        assert whole.startswith(text)
    assert text + detokenizer.rest(len(ids)) == whole


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.eos_token_id = tokenizer.eos_token_id
        self.tokens = self.calls = 0
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.tokens += len(token_ids)
        self.calls += 1
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def told(
    tokenizer: object, ids: Sequence[int], ends: Sequence[int], **asked: object
) -> tuple[list[TextChoice], list[int]]:
    """What a completion of these tokens is told as, when they come up to each of `ends`."""
    body = CompletionRequest(prompt="x", return_token_ids=True, **asked)
    (draft,) = Request([1], Sampling(10**6)).begun(0, 10**6)
    text = Text(draft, 0, body, tokenizer)
    found = []
    for start, end in pairwise([0, *ends]):
        draft.drawn += ids[start:end]
        draft.logprobs += [-0.5] * (end - start)
        grown = text.grown(Part(draft, start, end, 0, FinishReason.LENGTH if end == len(ids) else None))
        if grown is not None:
            found.append(grown)
        if text.ended:
            break
    assert text.ended
    return found, draft.drawn


def test_every_token_is_decoded_a_bounded_number_of_times(tokenizers: list[PreTrainedTokenizerFast]) -> None:
    for tokenizer in tokenizers:
        counting = Counting(tokenizer)
        ids = ids_of(tokenizer, [2 * (5 + i % 40) for i in range(600)])
        told(counting, ids, range(1, 601), stream=True, stop=["never in it"])
        assert counting.tokens < 3 * WINDOW_TOKENS * len(ids)


def test_what_is_neither_streamed_nor_looked_through_for_stop_texts_is_decoded_once(
    tokenizers: list[PreTrainedTokenizerFast],
) -> None:
    counting = Counting(tokenizers[0])
    ids = ids_of(tokenizers[0], range(300))
    (choice,), _ = told(counting, ids, range(1, 301))
    assert (choice.text, counting.calls) == (tokenizers[0].decode(ids, skip_special_tokens=True), 1)


def cut_off(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop text that is complete first, found character by character; None without one."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return None


@settings(max_examples=400)
@example(  # both in one token
    before="", stops=["€ tool", "too"], after="", invalid=False, cuts=None, stream=True, logprobs=None
)
@given(
    before=st.text("ab€é\n", max_size=12),
    stops=st.lists(st.text("ab€\n", min_size=1, max_size=8), min_size=1, max_size=3),
    after=st.text("ab€ \n", max_size=12),
    invalid=st.booleans(),
    cuts=st.none() | fractions,
    stream=st.booleans(),
    logprobs=st.none() | st.just(0),
)
def test_a_completion_is_the_text_before_its_first_stop_text_wherever_that_begins(
    before: str,
    stops: list[str],
    after: str,
    invalid: bool,
    cuts: list[float] | None,
    stream: bool,
    logprobs: int | None,
    tokenizers: list[PreTrainedTokenizerFast],
) -> None:
    tokenizer = tokenizers[0]
    ids = tokenizer.encode(before + stops[0] + after)
    if invalid:
        ids.insert(len(ids) // 2, tokenizer.convert_tokens_to_ids("Ĥ"))
    ends = range(1, len(ids) + 1) if cuts is None else ends_of(cuts, len(ids))
    found, drawn = told(tokenizer, ids, ends, stop=stops, stream=stream, logprobs=logprobs)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    expected = cut_off(whole, stops)
    assert "".join(choice.text for choice in found) == (whole if expected is None else expected)
    assert [choice.finish_reason for choice in found][-1] == ("length" if expected is None else "stop")
    assert len(found) == 1 or (stream and all(choice.text for choice in found[:-1]))
    token_ids = [token for choice in found for token in choice.token_ids or ()]
    assert token_ids == drawn[: len(token_ids)]
    if expected is not None:  # up to the token that completes it, in whatever pieces they came
        assert cut_off(tokenizer.decode(token_ids, skip_special_tokens=True), stops) == expected
        assert cut_off(tokenizer.decode(token_ids[:-1], skip_special_tokens=True), stops) is None
    if logprobs is not None:
        offsets = [at for choice in found for at in choice.logprobs.text_offset]
        assert offsets == sorted(offsets)
        assert [at for at in offsets if at > len(whole)] == []
        assert len(offsets) == len(token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begins", range(13))
def test_what_might_begin_a_stop_text_is_held_back_from_the_first_character_on(begins: int, stream: bool) -> None:
    tokenizer, stop = byte_level(), "\n\nQuestion:"
    text = "0123456789abc"[:begins]
    ids = tokenizer.encode(text + stop + " what")
    found, _ = told(tokenizer, ids, range(1, len(ids) + 1), stop=stop, stream=stream)
    assert "".join(choice.text for choice in found) == text


def test_an_empty_stop_text_is_none() -> None:
    for stop in ("", [""], ["", "9"]):
        (choice,), _ = told(byte_level(), byte_level().encode("bb"), [1, 2], stop=stop)
        assert choice.text == "bb"


def test_offsets_point_to_where_a_tokens_text_begins() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "<s>", "â", "Ĥ", "¬", "b")]
    for stream, ends in ((False, [6]), (True, range(1, 7)), (True, [2, 6])):
        found, _ = told(tokenizer, ids, ends, stream=stream, logprobs=0)
        assert [at for choice in found for at in choice.logprobs.text_offset] == [0, 1, 1, 1, 1, 2]
