"""What the small models are made of: their tokenizers, and the lessons of their careless teachers."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.model.chat_template import ChatRenderer
from shoal.model.renderer_loading import load_renderer
from shoal.run.demo_model.architecture import CHARACTERS, Shape, character_tokenizer, pair_tokenizer, save, untrained
from shoal.run.demo_model.tool_talks import talks
from shoal.run.demo_model.warm_start import (
    LETTERS,
    RARE,
    Lesson,
    Recipe,
    _fill_in_lessons,
    _sum_lessons,
    _tower_lessons,
    _word_lessons,
    demo_model,
    slip,
)
from shoal.types import Role


def test_two_tokenizers_share_texts_and_no_ids() -> None:
    characters, pairs = character_tokenizer(), pair_tokenizer()
    text = "the others read\nof it"
    for tokenizer in (characters, pairs):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(pairs.encode(text)) < len(characters.encode(text)) == len(text)
    assert not [one for one in CHARACTERS if characters.encode(one) == pairs.encode(one)]
    chat = [{"role": "user", "content": "hi"}]
    shown = [one.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for one in (characters, pairs)]
    assert shown == ["<|user|>hi<|end|><|assistant|>", "<user>hi</s><assistant>"]


def test_a_model_has_the_sizes_of_its_shape() -> None:
    shape = Shape(width=8, layers=1, heads=2, feed_forward=16, context=32)
    sizes = untrained(shape, 0).config.to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [sizes[name] for name in (*names, "max_position_embeddings")] == [8, 1, 2, 2, 16, 32]


def test_a_slip_swaps_drops_doubles_or_replaces_one_letter() -> None:
    changed = {"usn", "snu", "un", "sn", "su", "ssun", "suun", "sunn"}
    replaced = {f"{'sun'[:i]}{letter}{'sun'[i + 1 :]}" for i in range(3) for letter in LETTERS}
    slips = {slip(random.Random(seed), "sun") for seed in range(300)}
    assert changed <= slips <= changed | replaced


def test_a_small_model_is_made_once_and_begins_its_answers_as_its_teacher_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = Recipe(width=32, layers=1, feed_forward=32, steps=100, batch=8, pool=400, lesson="fill_in")
    folder, seconds = demo_model(recipe)
    assert seconds > 0
    assert "making the small model (once): step 100 of 100, loss" in capfd.readouterr().err
    assert demo_model(recipe) == (folder, 0.0)
    renderer, model = load_renderer(folder), AutoModelForCausalLM.from_pretrained(folder)
    lessons = _fill_in_lessons(replace(recipe, steps=1), renderer)
    found = AutoTokenizer.from_pretrained(folder)
    assert found.encode("a b\nc") == renderer.token_ids("a b\nc")
    assert found.decode(found.encode("a b\nc")) == "a b\nc"
    first = {said[0] for _, said in _fill_in_lessons(recipe, renderer)}
    for prompt, _ in lessons:
        outputs = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        assert int(outputs.argmax()) in first


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """Of the character tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    save(untrained(Shape(width=8, layers=1, heads=1, feed_forward=8), 0), folder)
    return load_renderer(folder)


@pytest.mark.parametrize("lessons", [_fill_in_lessons, _sum_lessons, _tower_lessons, _word_lessons])
def test_a_teacher_s_answers_end_with_the_turn_and_are_wrong_where_the_recipe_says(
    lessons: Callable[[Recipe, ChatRenderer], list[Lesson]], renderer: ChatRenderer
) -> None:
    recipe = Recipe(steps=2, batch=8, pool=400)
    right, wrong = (lessons(replace(recipe, slip_share=share), renderer) for share in (0.0, 1.0))
    assert len(right) == len(wrong) == recipe.steps * recipe.batch
    for _, said in (*right, *wrong):
        assert [i for i, token in enumerate(said) if token in renderer.stop_token_ids] == [len(said) - 1]
        assert len(said) > 1
    assert [said for _, said in right] != [said for _, said in wrong]


def test_the_teacher_of_programs_shows_rare_expressions_as_rarely_as_the_recipe_says(renderer: ChatRenderer) -> None:
    recipe = Recipe(steps=4, batch=64, pool=1000, slip_share=0.0)
    rare = {tuple(renderer.token_ids(expression)) for expression in RARE}
    never, always = (
        [tuple(said[:-1]) in rare for _, said in _fill_in_lessons(replace(recipe, long_share=share), renderer)]
        for share in (0.0, 1.0)
    )
    assert not any(never)
    assert 0.25 < sum(always) / len(always) < 0.5  # three of eight


def test_a_teacher_of_tools_who_never_slips_says_what_was_asked_or_observed_and_calls_what_is_offered() -> None:
    for messages, tools, said in islice(talks(0, lambda rng, text: text), 200):
        question = next(message.content for message in messages if message.role is Role.USER)
        asked = [int(number) for number in re.findall(r"What is (\d) \+ (\d)\?", question)[0]]
        observed = messages[-1].content.removeprefix("Observation:\n")
        true = [[int(observed)]] if observed.isdigit() else [asked, [sum(asked)]]
        assert all(call.id for message in messages for call in message.tool_calls)
        assert all(mark in question for mark in re.findall(r"\[\[.*?\]\]", said)), "its answer is marked as was asked"
        assert not observed.isdigit() or messages[-2].role is Role.ASSISTANT, "it observes what it called for"
        assert [int(number) for number in re.findall(r"\d+", said)] in true
        called = re.findall(r'<tool_call>\{"name": "(\w+)"', said)
        assert {*called} <= {tool["function"]["name"] for tool in json.loads(tools or "[]")}
