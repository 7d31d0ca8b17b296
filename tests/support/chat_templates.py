"""Chat templates in the styles of five families, written for the tests, and a tokenizer whose merges cross turns."""

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shoal.model.chat_template import ChatRenderer


@dataclass(frozen=True)
class Style:
    """A template, the special tokens it writes, and those that end an answer."""

    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]


_QWEN_HEAD = (
    "{%- if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call as <tool_call>{"name": n, "arguments": {}}</tool_call><|im_end|>\n{% endif %}'
)
_QWEN_BODY = (
    "{%- for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n%THOUGHT%{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN3_THOUGHT = (
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
)
_LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %},{% endif %}{% endfor %}]</s>{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_GLM = (
    "{{ '[gMASK]<sop>' }}{% if tools %}<|system|>{{ tools | tojson }}"
    "<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

STYLES = {
    "qwen2.5": Style(_QWEN_HEAD + _QWEN_BODY.replace("%THOUGHT%", ""), _CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Style(_QWEN_HEAD + _QWEN_BODY.replace("%THOUGHT%", _QWEN3_THOUGHT), _CHATML, ("<|im_end|>",)),
    "llama3": Style(
        _LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "gemma": Style(_GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>")),
    "mistral": Style(
        _MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        ("</s>",),
    ),
    "glm": Style(
        _GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
}
# The headers and ends of turns of published templates whose models think, without what they do besides.
_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_R1 = (
    "{{ '<|begin_of_sentence|>' }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end_of_sentence|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
_GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_MAGISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}{# [THINK] thoughts [/THINK] #}"
)
ANSWERING = {
    "qwen3": STYLES["qwen3"],
    "deepseek-r1": Style(
        _R1, ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"), ("<|end_of_sentence|>",)
    ),
    "smollm2": Style(_TURNS, _CHATML, ("<|im_end|>",)),
    "llama3": STYLES["llama3"],
    "gpt-oss": Style(
        _GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
    ),
    "magistral": Style(_MAGISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"), ("</s>",)),
}
"""Templates by how their models part thought and answer."""
CORPUS = ["the answer is 12.\n\nuser asks: what is 3 + 4?\nassistant\n\nthe tool says 7\n"] * 8


def tokenizer(style: Style) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the style's special tokens."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in style.specials])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=style.stops[0])
    wrapped.chat_template = style.template
    return wrapped


@cache
def renderer(name: str) -> ChatRenderer:
    """A renderer for one of `STYLES`."""
    return renderer_of(STYLES[name])


def renderer_of(style: Style) -> ChatRenderer:
    """A renderer for a style."""
    made = tokenizer(style)
    return ChatRenderer(made, tuple(made.convert_tokens_to_ids(token) for token in style.stops))
