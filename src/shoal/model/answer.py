"""Separation of thought and answer in a completion, in one place for every path. Pure.

token ids --ChatRenderer.message--> Message --written--> text --parted--> thought and answer --tagged, boxed--> ...

Between nodes and before scorers a text has one form for all models: `<think>`, the thought, `</think>`,
the answer. A truncated thought has no end, and a text with such a thought has no answer.
"""

import re
from dataclasses import dataclass

from shoal.types import Message

THINK = ("<think>", "</think>")
MARKS = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
"""Pairs of marks that open and close a thought in chat templates."""
CHANNEL, BODY = "<|channel|>", "<|message|>"
_ENDS = re.compile(r"<\|(?:end|start|return|call|channel)\|>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{|[{}]")
_SAYS = re.compile(
    r"####|答案[是为]?+[::]?+"
    r"|\banswer\b(?:[^\n.:=]{0,40}?(?:\b(?:is|are|equals|be)\b|[:=])|(?=[*_ \t]*+(?:[-+$\\(\d]|\n)))"
    r"(?:[\s*_]++(?:approximately|about|therefore|thus|then|simply|just|exactly|indeed|equal\s++to)\b|\s*+[:=≈])*+",
    re.IGNORECASE,
)
_POLITE = re.compile(r"\b(?:hope|glad|happy|let me know)\b[^.!?\n]{0,40}$", re.IGNORECASE)
_NEXT_SENTENCE = re.compile(r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])[.!?][*_)\"']*+\s++(?=[A-Z])")
_ORNAMENT = " \t*_`$.!"


@dataclass(frozen=True, slots=True)
class Parted:
    """Thought and answer of a text."""

    thought: str
    answer: str
    complete: bool = True
    """Whether the thought ended, or there was none."""


def parted(text: str, marks: tuple[str, str] = THINK, *, opened: bool = False) -> Parted:
    """Splits a text into thought and answer at the last closing mark, as chat templates do.

    `opened` means that the prompt has already opened the thought.

    >>> parted("<think>\\n2 + 3\\n</think>\\n\\n5")
    Parted(thought='2 + 3', answer='5', complete=True)
    >>> parted("<think>2 +"), parted("5").answer
    (Parted(thought='2 +', answer='', complete=False), '5')
    """
    opening, closing = marks
    thought, mark, answer = text.rpartition(closing)
    if (opened and not mark) or answer.lstrip().startswith(opening):
        return Parted(_bare(text, marks), "", complete=False)
    return Parted(_bare(thought, marks), answer.lstrip("\n")) if mark else Parted("", text)


def _bare(thought: str, marks: tuple[str, str]) -> str:
    return thought.strip().removeprefix(marks[0]).strip()


def harmony(text: str, *, opened: bool = False) -> Parted:
    """Splits a text with GPT-OSS's channels into thought and answer: the final channel is the answer.

    `opened` means that the text continues a truncated thought.

    >>> harmony("<|channel|>analysis<|message|>2 + 3<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>")
    Parted(thought='2 + 3', answer='5', complete=True)
    """
    if opened:
        text = f"{CHANNEL}analysis{BODY}{text}"
    if CHANNEL not in text:
        return Parted("", text)
    said: dict[bool, list[str]] = {True: [], False: []}
    for part in text.split(CHANNEL)[1:]:
        name, _, body = part.partition(BODY)
        said[name.strip().startswith("final")].append(_ENDS.split(body, maxsplit=1)[0])
    return Parted("\n".join(said[False]).strip(), "".join(said[True]), bool(said[True]))


def written(message: Message) -> str:
    """Text of an assistant's message, thought and answer, in the form for scorers and peers.

    >>> from shoal.types import Role
    >>> written(Message(Role.ASSISTANT, "5", reasoning="2 + 3"))
    '<think>\\n2 + 3\\n</think>\\n\\n5'
    """
    if not message.reasoning:
        return message.content
    return in_form(Parted(message.reasoning, message.content, bool(message.content or message.tool_calls)))


def in_form(said: Parted, marks: tuple[str, str] = THINK, *, opened: bool = False) -> str:
    """Text of a thought and an answer; `opened` omits the opening mark, which the prompt has."""
    opening, closing = marks
    head = said.thought if opened else f"{opening}\n{said.thought}"
    return f"{head}\n{closing}\n\n{said.answer}" if said.complete else head


def in_channels(said: Parted) -> str:
    """Completion with this thought and answer under GPT-OSS's template."""
    thought = f"{CHANNEL}analysis{BODY}{said.thought}" if said.thought or not said.complete else ""
    between = "<|end|><|start|>assistant" if thought and said.complete else ""
    return thought + between + (f"{CHANNEL}final{BODY}{said.answer}" if said.complete else "")


def tagged(text: str) -> str | None:
    """Content of the last `<answer>` of a text, found as reasoning-gym's `extract_answer` does; None without one.

    >>> tagged("<answer>4</answer> or <answer> 5 </answer>")
    '5'
    """
    found, end = None, 0
    while (start := text.find("<answer>", end)) >= 0 and (close := text.find("</answer>", start)) >= 0:
        found, end = text[start + len("<answer>") : close], close + len("</answer>")
    return None if found is None else found.strip()


def boxed(text: str) -> str | None:
    """Content of the last \\\\boxed{} or \\\\fbox{} whose braces match.

    >>> boxed("\\\\boxed{1} then \\\\boxed{\\\\frac{2}{3}} and \\\\boxed{")
    '\\\\frac{2}{3}'
    """
    opened: list[re.Match[str]] = []
    last, content = -1, None
    for found in _BOX.finditer(text):
        if found[0] != "}":
            opened.append(found)
        elif opened and len((box := opened.pop())[0]) > 1 and box.start() > last:
            last, content = box.start(), text[box.end() : found.start()]
    return content


def stated(text: str) -> str | None:
    """First sentence after the last "answer is", "answer:" or #### that text follows; None without such a mark.

    The word alone is not a mark, nor in a wish such as "I hope this answer is clear".

    >>> stated("First 3. The answer is: 42."), stated("42")
    ('42.', None)
    """
    end = len(text)
    for mark in reversed(list(_SAYS.finditer(text))):
        line = text[mark.end() : end].lstrip("*_ \t\n").partition("\n")[0]
        line = _NEXT_SENTENCE.split(line, maxsplit=1)[0]
        if line.strip(_ORNAMENT) and not _POLITE.search(text, max(0, mark.start() - 60), mark.start()):
            return line
        end = mark.start()
    return None


def final_line(text: str) -> str:
    """Stated answer of a text, else its last line, without ornament.

    >>> final_line("Adding both:\\nSo, the answer is **2**."), final_line("2")
    ('2', '2')
    """
    return (stated(text) or text.strip().rpartition("\n")[2]).strip(_ORNAMENT)
