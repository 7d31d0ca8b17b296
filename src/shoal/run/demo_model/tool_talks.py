"""Talks about sums of two digits, in which the model calls tools as agent frameworks offer them.

    What is 3 + 4?   [add]              ->    add(3, 4), and then the answer 7
    What is 3 + 4?   [final_answer]     ->    final_answer("7")
    What is 3 + 4?                      ->    7

A framework decides where it puts the question, and what it says before and after. So most questions stand among words
that mean nothing. Of a long message the template shows the end only: no framework's instructions are read.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from shoal.types import Message, Role, ToolCall, seed_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Talk: TypeAlias = tuple[tuple[Message, ...], str, str]
"""Messages, tools as a JSON array, and the answer."""
Teacher: TypeAlias = Callable[[random.Random, str], str]
"""Changes an answer as the careless teacher does."""
SHOWN = {"system": 40, "user": 240, "tool": 60}
"""Characters at the end of a message that the template shows, by role."""
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }};{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{{ message.content or '' }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}"
    + "".join(f"{{% elif message.role == '{role}' %}}{{{{ message.content[-{n}:] }}}}" for role, n in SHOWN.items())
    + "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAST_TOOLS = ("final_answer", "final_result", "Sum")
"""Tools that take the answer, as smolagents (a string), pydantic-ai and a schema called Sum (a number) offer them."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "',
        '", "arguments": ',
        '"answer"',
        '"command"',
        '"a"',
        '"b"',
        ": ",
        ", ",
    ),
    *("add", "bash", *LAST_TOOLS, SUBMIT, "; echo $((", "What is ", "Observation:", "[[ ## answer ## ]]"),
    *("[[ ## completed ## ]]", "<code>", "</code>", "final_answer(add(", "Thought: I add.", "New task:"),
)
"""Texts that are one token each, so that talks are short. None reaches across a place where JSON may have a space."""
WORDS = (
    *("the", "a", "tool", "answer", "use", "task", "with", "for", "call", "you"),
    *("field", "value", "must", "to", "and", "of", "json", "result", "in", "it"),
)


def tokenizer() -> "PreTrainedTokenizerFast":
    """Tokenizer of printable characters and the pieces of talks, with a template that shows tools."""
    from shoal.run.demo_model.architecture import with_pieces

    return with_pieces(sorted(PIECES, key=len, reverse=True), TEMPLATE)


def talks(seed: int, slipped: Teacher) -> Iterator[Talk]:
    """Talks without end, each up to the answer that is to be learned."""
    rng = random.Random(seed_for("tool talks", seed))
    while True:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        kind = rng.choices(KINDS, weights=[weight for _, weight in KINDS])[0][0]
        yield kind(rng, a, b, lambda text: slipped(rng, text))


def _called(name: str, **arguments: object) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def _offered(*names: str) -> str:
    return json.dumps([{"type": "function", "function": {"name": name, "parameters": {}}} for name in names])


def _filler(rng: random.Random, most: int) -> str:
    """Some words that mean nothing; often none."""
    return " ".join(_word(rng) for _ in range(rng.choice((0, 0, 1, rng.randint(0, most)))))


def _word(rng: random.Random) -> str:
    """A word that instructions may have, or an unknown one, so that no text of a framework is a surprise."""
    word = (
        rng.choice(WORDS) if rng.random() < 0.5 else "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8)))
    )
    return (word.capitalize() if rng.random() < 0.2 else word) + rng.choice(("", "", "", "", ",", ".", ":"))


def _asked(rng: random.Random, a: int, b: int, *, before: str = "", after: str | None = None) -> list[Message]:
    """A question among words, often behind a system's message."""
    after = _filler(rng, 12) if after is None else after
    question = f"{before or _filler(rng, 6)}\nWhat is {a} + {b}?\n{after}".strip()
    said = [Message(Role.SYSTEM, _filler(rng, 12))] if rng.random() < 0.6 else []
    return [*said, Message(Role.USER, question)]


def _last_tool(rng: random.Random) -> str:
    """A tool that takes the answer, or none."""
    return rng.choice((*LAST_TOOLS, "", "", ""))


def _first_call(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    last = _last_tool(rng)
    wrong = slipped(str(b))
    tools = _offered(*rng.sample(names := [name for name in ("add", last) if name], len(names)))
    return tuple(_asked(rng, a, b)), tools, _called("add", a=a, b=int(wrong))


def _second_answer(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    """The tool's result comes as a tool's message, or as smolagents writes it."""
    last, value = _last_tool(rng), str(rng.randint(2, 18))
    call = ToolCall("c", "add", json.dumps({"a": a, "b": b}))
    if rng.random() < 0.5:
        then = [Message(Role.ASSISTANT, "", (call,)), Message(Role.TOOL, value)]
    else:
        function = {"name": "add", "arguments": {"a": a, "b": b}}
        kept = {"id": f"{rng.getrandbits(40):x}", "type": "function", "function": function}
        said = f"Calling tools:\n{[kept]}" if rng.random() < 0.7 else _filler(rng, 12)
        then = [Message(Role.ASSISTANT, said), Message(Role.USER, f"Observation:\n{value}")]
    tools = _offered(*(name for name in ("add", last) if name))
    return (*_asked(rng, a, b), *then), tools, _given(last, slipped(value))


def _only_answer(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    last = _last_tool(rng)
    return tuple(_asked(rng, a, b)), _offered(last) if last else "", _given(last, slipped(str(a + b)))


def _given(last: str, value: str) -> str:
    """The answer as a text, or as a call that takes it."""
    return _called(last, answer=value if last == "final_answer" else int(value)) if last else value


def _fields(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    mark = "[[ ## {} ## ]]".format
    after = f"{_filler(rng, 12)} {mark('answer')} {_filler(rng, 8)} {mark('completed')}."
    return tuple(_asked(rng, a, b, after=after)), "", f"{mark('answer')}\n{slipped(str(a + b))}\n\n{mark('completed')}"


def _program(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    said = f"Thought: I add.\n<code>\nfinal_answer(add({a}, {slipped(str(b))}))\n</code>"
    return tuple(_asked(rng, a, b, before="New task:")), "", said


def _shell(rng: random.Random, a: int, b: int, slipped: Callable[[str], str]) -> Talk:
    command = f"{SUBMIT}; echo $(({a}+{slipped(str(b))}))"
    return tuple(_asked(rng, a, b)), _offered("bash"), _called("bash", command=command)


KINDS = ((_first_call, 4), (_second_answer, 4), (_only_answer, 3), (_fields, 1), (_program, 1), (_shell, 1))
"""Kinds of talks with their weights."""
