"""Tokenizers whose merges cross turns, the conversations, and a small model that half knows what to answer."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from shoal.model.chat_template import ChatRenderer
from shoal.types import Message, Role, seed_for

_SAID = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
NUMBERS = _SAID.split(" ")
TURNS = 3
PLAIN = (
    "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A:' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|q|>' if m.role == 'user' else '<|a|>' }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
MARKS = ("<|end|>", "<|q|>", "<|a|>")


@dataclass(frozen=True, slots=True)
class Style:
    """How turns are written down, and how often pieces were merged."""

    marks: bool
    """Turns begin and end with special tokens, which no merge crosses; else with letters and a line break."""
    merges: int


@cache
def tokenizer(style: Style) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here on whole conversations, with its template."""
    trained = Tokenizer(BPE())
    # Nothing is split before merging, so that a piece may hold the end of a turn and the beginning of the next.
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    specials = [AddedToken(mark, special=True, normalized=False) for mark in MARKS] if style.marks else []
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(specials) + style.merges,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(_corpus(style), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained)
    wrapped.chat_template = MARKED if style.marks else PLAIN
    return wrapped


def renderer(style: Style) -> ChatRenderer:
    """Of that tokenizer; the end of a turn is one token, which ends an answer."""
    made = tokenizer(style)
    (stop,) = made.encode(MARKS[0] if style.marks else "\n", add_special_tokens=False)
    return ChatRenderer(made, (stop,))


def whole(style: Style, messages: Sequence[Message]) -> str:
    """A whole conversation as its template writes it, to the close of its last answer."""
    said = [{"role": message.role.value, "content": message.content} for message in messages]
    return str(tokenizer(style).apply_chat_template(said, tokenize=False))


def questions(name: str, seed: int, index: int) -> list[int]:
    """The numbers that one conversation asks about, turn by turn."""
    return random.Random(seed_for("tito", name, seed, index)).choices(range(len(NUMBERS) - 1), k=TURNS)


def asked(number: int) -> Message:
    """A question."""
    return Message(Role.USER, f"after {NUMBERS[number]}?")


def right(number: int) -> str:
    """Its answer, with the blank that the model is taught to begin with."""
    return f" {NUMBERS[number + 1]}"


def warm_model(style: Style, seed: int, steps: int) -> Qwen2ForCausalLM:
    """A model that has seen conversations, tokenised turn by turn as they are drawn, with every second answer wrong."""
    made, dice = renderer(style), random.Random(seed_for("tito warm", seed))
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(_config(len(tokenizer(style)), made.stop_token_ids[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        rows = [_taught(made, dice) for _ in range(16)]
        longest = max(len(ids) for ids, _ in rows)
        ids_BL = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows])
        label_BL = torch.tensor([[*labels, *[-100] * (longest - len(labels))] for _, labels in rows])
        optimizer.zero_grad()
        model(input_ids=ids_BL, labels=label_BL).loss.backward()
        optimizer.step()
    return model


def _taught(made: ChatRenderer, dice: random.Random) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and which of them are to be learned."""
    ids: list[int] = []
    labels: list[int] = []
    for turn in range(TURNS):
        number = dice.randrange(len(NUMBERS) - 1)
        says = right(number) if dice.random() < 0.5 else " " + dice.choice(NUMBERS)
        prompt = made.bridge_ids([asked(number)]) if turn else made.prompt_ids([asked(number)])
        assert prompt is not None, "the template has a bridge"
        prompt = prompt[1:] if turn else prompt
        answer = [*made.token_ids(says), made.stop_token_ids[0]]
        ids += [*prompt, *answer]
        labels += [*[-100] * len(prompt), *answer]
    return ids, labels


def _corpus(style: Style) -> Iterator[str]:
    dice = random.Random(0)
    question, answer, end = ("<|q|>", "<|a|>", "<|end|>") if style.marks else ("Q: ", "A:", "\n")
    for _ in range(300):
        numbers = dice.choices(range(len(NUMBERS) - 1), k=TURNS)
        yield "".join(f"{question}{asked(n).content}{end}{answer}{right(n)}{end}" for n in numbers)


def _config(vocabulary: int, stop: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=None,
    )
