"""Fields of a request: those that are served, those without effect here, and those refused, with a workaround."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import msgspec

from shoal.errors import SessionError
from shoal.net.server import decoded

K = TypeVar("K", bound=msgspec.Struct)
MOST_ENTRIES = 8192
"""Entries of a list or an object in a field: messages, tools, texts."""
MOST_TOKENS = 1 << 18
"""Entries of a list of token ids, which cost less; also commas of a body."""
MOST_OPENED = 1 << 17
"""Lists and objects of a body: decoding more of them takes seconds, even if they are short."""
SHOWN_CHARACTERS = 200
"""Characters of a refused value that an error shows."""


class Refusal(SessionError):
    """Refusal of a field's value that cannot be served (HTTP 400); `field` names the field."""

    def __init__(self, field: str, expected: str, came: object, remedy: str = "") -> None:
        shown = repr(came)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
        super().__init__(f"{field}: expected {expected}, got {shown}{f'; {remedy}' if remedy else ''}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that is refused, except for values without effect."""

    remedy: str
    """Workaround, as an imperative."""
    values: Sequence[object] = ()

    def check(self, name: str, value: object) -> None:
        """Raises `Refusal` for a value that would have an effect."""
        if value is not None and value not in self.values:
            raise Refusal(name, f"none or {self.values[-1]!r}" if self.values else "none", value, self.remedy)


Fields = Mapping[str, Unserved]
_OTHER_SERVERS = "leave it out; temperature, top_p, top_k and min_p are served"
OTHER_SERVERS: Fields = {
    **dict.fromkeys(("typical_p", "top_a"), Unserved(_OTHER_SERVERS, (0, -1))),
    **dict.fromkeys(("min_tokens", "no_repeat_ngram_size"), Unserved(_OTHER_SERVERS, (0,))),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), Unserved(_OTHER_SERVERS, (1,))),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), Unserved(_OTHER_SERVERS, ([],))),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        Unserved("use response_format with a JSON Schema"),
    ),
    **dict.fromkeys(
        ("ignore_eos", "use_beam_search", "include_stop_str_in_output"), Unserved("leave it out", (False,))
    ),
}
"""Sampling parameters of vLLM and similar servers."""
UNTRAINED: Fields = dict.fromkeys(
    ("presence_penalty", "frequency_penalty"),
    Unserved("a session trains on what it samples, and a penalty would change it; leave it out", (0,)),
) | {
    "logit_bias": Unserved("a session trains on what it samples, and a bias would change it; leave it out", ({},)),
    "top_logprobs": Unserved("a session keeps the logprob of each sampled token alone; ask for logprobs", (0,)),
    "echo": Unserved("the client has the prompt; ask without a session for its logprobs", (False,)),
}
"""Fields that trained sessions refuse."""
_ACCOUNT = "it concerns an account with another provider"
_CACHE = "the engine keeps every prefix that it has room for"
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "user_profile_id", "workspace_id"), "a label"),
    **dict.fromkeys(("service_tier", "inference_geo", "speed", "billing_policy", "betas", "priority"), _ACCOUNT),
    **dict.fromkeys(("access_programs", "fallback_credit_token"), _ACCOUNT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _CACHE),
    **dict.fromkeys(("cache_control", "cache_salt"), _CACHE),
    "diagnostics": "it asks for figures about a provider's cache",
    "store": "the session's token tree keeps every answer until the session ends",
    "include": "answers carry all that there is to include",
    "verbosity": "the model knows no such setting",
    "add_generation_prompt": "continue_final_message decides it",
}
"""Fields without effect here, with the reason."""


def fields_of(data: bytes, kind: type[msgspec.Struct], unserved: Fields, *, strict: bool) -> dict[str, object]:
    """Fields of a body for `kind`; `strict` refuses unknown ones. Raises `SessionError` or `Refused`."""
    for what, count, most in (
        ("lists and objects", data.count(b"[") + data.count(b"{"), MOST_OPENED),
        ("entries", data.count(b","), MOST_TOKENS),
    ):
        if count > most:
            raise SessionError(f"body: expected at most {most} {what}, with those in its texts; got {count}")
    fields = decoded(data, dict[str, object])
    known = [one.encode_name for one in msgspec.structs.fields(kind)]
    for name, value in fields.items():
        check_size(name, value)
        if name in unserved:
            unserved[name].check(name, value)
        elif strict and name not in known and name not in HARMLESS:
            near = get_close_matches(name, [*known, *unserved, *HARMLESS], 1)
            meant = f"; {near[0]!r} may be meant" if near else "; leave it out"
            raise Unknown(name, f"{name}: this field is not known here{meant}")
    return fields


def check_size(name: str, value: object) -> None:
    """Raises `Refusal` for a list or an object with too many entries, before it is converted."""
    if not isinstance(value, list | dict):
        return
    is_tokens = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    most = MOST_TOKENS if is_tokens else MOST_ENTRIES
    if len(value) > most:
        raise Refusal(name, f"at most {most} entries", len(value), "send fewer at a time")
    for i, one in enumerate(value if isinstance(value, list) and not is_tokens else ()):
        parts = one.get("content") if isinstance(one, dict) else one
        if isinstance(parts, list) and not (parts and isinstance(parts[0], int)) and len(parts) > MOST_ENTRIES:
            raise Refusal(f"{name}[{i}]", f"at most {MOST_ENTRIES} entries", len(parts), "join them")


class Unknown(Refusal):
    """Refusal of a field that no API of the gateway has."""

    def __init__(self, field: str, said: str) -> None:
        SessionError.__init__(self, said)
        self.field = field


def converted(fields: Mapping[str, object], kind: type[K]) -> K:
    """Request of these fields. Raises `SessionError`, naming the field."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SessionError(f"body: {error}") from error


def unicode(where: str, text: str) -> str:
    """The text, checked for lone surrogates. Raises `Refusal`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(where, "Unicode text", "lone surrogates") from None
    return text
