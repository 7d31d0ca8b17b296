"""Fields of the SDKs of OpenAI and Anthropic: each is served, refused with a remedy, or ignored with a reason."""

from typing import Any, get_type_hints

import msgspec
import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as texts
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from shoal.gateway.anthropic import MESSAGES
from shoal.gateway.completions import CHAT, TEXT
from shoal.gateway.dialects import Dialect
from shoal.gateway.fields import HARMLESS
from shoal.gateway.responses import RESPONSES

SDKS: dict[str, tuple[Dialect[Any], type]] = {
    "openai chat": (CHAT, chats.CompletionCreateParamsNonStreaming),
    "openai completions": (TEXT, texts.CompletionCreateParamsNonStreaming),
    "openai responses": (RESPONSES, responses.ResponseCreateParamsNonStreaming),
    "anthropic messages": (MESSAGES, messages.MessageCreateParamsNonStreaming),
    "anthropic beta messages": (MESSAGES, beta_messages.MessageCreateParamsNonStreaming),
}


@pytest.mark.parametrize("sdk", SDKS)
def test_every_field_of_an_sdk_is_known(sdk: str) -> None:
    dialect, params = SDKS[sdk]
    served = {field.encode_name for field in msgspec.structs.fields(dialect.kind)}
    unknown = set(get_type_hints(params)) - served - set(dialect.unserved) - set(HARMLESS)
    assert unknown == set()
