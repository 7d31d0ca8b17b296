"""Every field that clients of each API can send: how it is served, why it has no effect, or what to do instead.

`tools/docs.py` writes these tables into docs/reference/gateway.md. A test holds them against the types of the SDKs.
"""

from shoal.gateway.fields import Ignored, Rules, Served, Unserved

_OTHER_SERVERS = "leave it out; temperature, top_p, top_k and min_p are served"
_CACHE = Ignored("the engine keeps every prefix that it has room for")
_ACCOUNT = Ignored("it concerns an account with another provider")
_LABEL = Ignored("a label")
_NO_TEXT = "describe it in words: the model reads text"
_RUN_TOOLS = "offer a function tool, and run it in the client"
_STRICT = Ignored("every schema is strict")
_TOOL_STRICT = Ignored("calls are sampled under their schema wherever tool_choice requires one")
_SCHEMA = Served("a JSON Schema that the answer satisfies; unset, any object (extra `shoal[serve]`)")
_EFFORT = Served("the argument `reasoning_effort` of the chat template")
_PARTS = Served("a text, or parts of text, which are joined")
_PADDING = Unserved("pad the events in a proxy", (False,))
_VERBOSITY = Unserved("say in the messages how long an answer should be", ("medium",))
_THOUGHTS = Ignored("the session keeps thoughts; without one the chat template drops earlier ones")
SHARED: Rules = {
    "model": Served("a name that GET /v1/models lists; any name in a session"),
    "stream": Served("events as they come; in a trained session, or with tools, once the answer is whole"),
    "max_tokens": Served("most tokens of an answer, its thought included"),
    "temperature": Served("of sampling; 0 takes the most likely token"),
    "top_p": Served("share of the probability that is sampled from"),
    "top_k": Served("as vLLM's"),
    "min_p": Served("as vLLM's"),
    "stop_token_ids": Served("as vLLM's"),
    "seed": Served("of sampling; with several answers it is the first one's"),
    "return_token_ids": Served("adds `prompt_token_ids`, `token_ids` and `weight_versions`"),
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
    **dict.fromkeys(("user", "metadata", "safety_identifier", "user_profile_id", "workspace_id"), _LABEL),
    **dict.fromkeys(("service_tier", "inference_geo", "speed", "billing_policy", "betas", "priority"), _ACCOUNT),
    **dict.fromkeys(("access_programs", "fallback_credit_token"), _ACCOUNT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _CACHE),
    **dict.fromkeys(("cache_control", "cache_salt"), _CACHE),
    "diagnostics": Ignored("it asks for figures about a provider's cache"),
    "store": Ignored("a session keeps its answers until it ends"),
    "add_generation_prompt": Ignored("continue_final_message decides it"),
}
"""Fields of all APIs, and sampling parameters of vLLM and similar servers."""
UNTRAINED: Rules = dict.fromkeys(
    ("presence_penalty", "frequency_penalty"),
    Unserved("a session trains on what it samples, and a penalty would change it; leave it out", (0,)),
) | {
    "logit_bias": Unserved("a session trains on what it samples, and a bias would change it; leave it out", ({},)),
    "top_logprobs": Unserved("a session keeps the logprob of each sampled token alone; ask for logprobs", (0,)),
    "echo": Unserved("the client has the prompt; ask without a session for its logprobs", (False,)),
}
"""Fields that trained sessions refuse."""
_COMPLETION: Rules = {
    **SHARED,
    "n": Served("number of answers; in a trained session they are branches"),
    "stop": Served("up to 16 texts; the answer ends before the first, which a thought does not end by"),
    "presence_penalty": Served("over the tokens of the answer"),
    "frequency_penalty": Served("over the tokens of the answer"),
    "logit_bias": Served("by token id"),
    "stream_options.include_usage": Served("token counts in a last chunk"),
    "stream_options.include_obfuscation": _PADDING,
}
_FUNCTIONS = Unserved("use tools and tool_choice", ("none", "auto"))
CHAT_FIELDS: Rules = {
    **_COMPLETION,
    "messages[].role": Served(
        "", ("system", "developer", "user", "assistant", "tool"), "send a result with role 'tool' and its tool_call_id"
    ),
    "messages[].content": _PARTS,
    "messages[].content[].type": Served("", ("text",), _NO_TEXT),
    "messages[].content[].text": _PARTS,
    "messages[].content[].prompt_cache_breakpoint": _CACHE,
    "messages[].name": Ignored("chat templates show no names; put it into the content"),
    "messages[].tool_calls[].id": Served("pairs a call with its result"),
    "messages[].tool_calls[].type": Served("", ("function",), _RUN_TOOLS),
    "messages[].tool_calls[].function.name": Served("as the template writes it"),
    "messages[].tool_calls[].function.arguments": Served("as the template writes them"),
    "messages[].tool_call_id": Served("pairs a result with its call"),
    "messages[].function_call": Unserved("use tool_calls"),
    "messages[].refusal": Unserved("send it as content", ("",)),
    "messages[].audio": Unserved("send its transcript as content"),
    "max_completion_tokens": Served("as max_tokens"),
    "tools[].type": Served("", ("function",), _RUN_TOOLS),
    "tools[].function.name": Served("as the template shows it"),
    "tools[].function.description": Served("as the template shows it"),
    "tools[].function.parameters": Served("as the template shows it"),
    "tools[].function.strict": _TOOL_STRICT,
    "tool_choice": Served("`required` samples calls alone (extra `shoal[serve]`)"),
    "tool_choice.type": Served("", ("function", "allowed_tools"), _RUN_TOOLS),
    "tool_choice.function.name": Served("only calls of this tool are sampled"),
    "tool_choice.allowed_tools.mode": Served("as tool_choice"),
    "tool_choice.allowed_tools.tools": Served("the model sees these tools alone"),
    "parallel_tool_calls": Served("false ends the answer after its first call"),
    "response_format.type": Served("", ("text", "json_object", "json_schema"), "send a JSON Schema"),
    "response_format.json_schema.schema": _SCHEMA,
    "response_format.json_schema.name": _LABEL,
    "response_format.json_schema.description": Ignored("the schema alone decides; put it into a message"),
    "response_format.json_schema.strict": _STRICT,
    "logprobs": Served("logprob, text and bytes of each token"),
    "top_logprobs": Served("up to 20 most likely tokens"),
    "reasoning_effort": _EFFORT,
    "chat_template_kwargs": Served("`enable_thinking`, `thinking` and `reasoning_effort` of the chat template"),
    "continue_final_message": Served("the answer goes on from the last assistant message"),
    "modalities": Unserved("ask for text", (["text"],)),
    "audio": Unserved("ask for text"),
    "prediction": Unserved("leave it out, or begin the answer with continue_final_message"),
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "web_search_options": Unserved("offer a search as a function tool and run it in the client"),
    "moderation": Unserved("moderate in the client"),
    "verbosity": _VERBOSITY,
}
TEXT_FIELDS: Rules = {
    **_COMPLETION,
    "prompt": Served("a text, token ids, or a list of either"),
    "max_tokens": Served("most tokens of an answer; 16 if unset; with `echo`, 0 only scores the prompt"),
    "logprobs": Served("0 for the logprobs of the tokens, up to 20 for the most likely ones too"),
    "echo": Served("the prompt comes before the answer, with its logprobs"),
    "suffix": Unserved("put the text behind into the prompt, in the model's own form", ("",)),
    "best_of": Unserved("ask for n answers with logprobs and keep the best", (1,)),
    "response_format": Unserved("ask /v1/chat/completions", ({"type": "text"},)),
}
TEXT_UNTRAINED: Rules = {**UNTRAINED, "logprobs": Unserved("ask for 0, the logprob of each sampled token alone", (0,))}
TOKENS_FIELDS: Rules = {
    **SHARED,
    "token_ids": Served("the prompt"),
    "sampling_params": Served("as vLLM's"),
    "request_id": Served("repeated in the answer"),
    "stream": Unserved("ask for a body", (False,)),
}
_WHOLE = "send the whole conversation as input, or previous_response_id"
_INCLUDED = (
    *("reasoning.encrypted_content", "message.input_image.image_url", "computer_call_output.output.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    "code_interpreter_call.outputs",
)
_DIRECT = Unserved("have the model call the tool", (["direct"],))
RESPONSES_FIELDS: Rules = {
    **{name: rule for name, rule in SHARED.items() if name != "max_tokens"},
    "input": Served("a text, or items"),
    "input[].type": Served(
        "",
        ("message", "function_call", "function_call_output", "reasoning"),
        "send messages, calls of functions and their outputs",
    ),
    "input[].role": Served("`developer` is `system`"),
    "input[].content": _PARTS,
    "input[].content[].type": Served("", ("input_text", "output_text", "text", "reasoning_text"), _NO_TEXT),
    "input[].content[].text": _PARTS,
    "input[].content[].annotations": Ignored("the text counts alone"),
    "input[].content[].logprobs": Ignored("the session keeps its own"),
    "input[].content[].prompt_cache_breakpoint": _CACHE,
    "input[].id": Ignored("the content says which answer is meant"),
    "input[].status": Ignored("an item is read as it is"),
    "input[].phase": Ignored("chat templates show no phases"),
    "input[].call_id": Served("pairs a call with its output"),
    "input[].name": Served("as the template writes it"),
    "input[].arguments": Served("as the template writes them"),
    "input[].output": Served("a text, or parts of text, which are joined"),
    "input[].output[].type": Served("", ("input_text",), _NO_TEXT),
    "input[].output[].text": _PARTS,
    "input[].output[].prompt_cache_breakpoint": _CACHE,
    "input[].async": Unserved("send an output when it is there", (False,)),
    "input[].caller.type": Served("", ("direct",), "have the model call the tool"),
    "input[].namespace": Unserved("name tools without namespaces", ("",)),
    "input[].summary": _THOUGHTS,
    "input[].encrypted_content": _THOUGHTS,
    "instructions": Served("the system message, in place of an earlier one"),
    "previous_response_id": Served("goes on from a response of the same session"),
    "max_output_tokens": SHARED["max_tokens"],
    "metadata": Served("repeated in the response"),
    "tools[].type": Served("", ("function",), _RUN_TOOLS),
    "tools[].name": Served("as the template shows it"),
    "tools[].description": Served("as the template shows it"),
    "tools[].parameters": Served("as the template shows it"),
    "tools[].strict": _TOOL_STRICT,
    "tools[].output_schema": Ignored("the client makes the outputs"),
    "tools[].async": Unserved("wait for the output in the client", (False,)),
    "tools[].allowed_callers": _DIRECT,
    "tools[].defer_loading": Unserved("offer the tools that the model needs", (False,)),
    "tool_choice": Served("`required` samples calls alone (extra `shoal[serve]`)"),
    "tool_choice.type": Served("", ("function", "allowed_tools"), _RUN_TOOLS),
    "tool_choice.name": Served("only calls of this tool are sampled"),
    "tool_choice.mode": Served("as tool_choice"),
    "tool_choice.tools": Served("the model sees these tools alone"),
    "parallel_tool_calls": Served("false ends the answer after its first call"),
    "text.format.type": Served("", ("text", "json_object", "json_schema"), "send a JSON Schema"),
    "text.format.schema": _SCHEMA,
    "text.format.name": _LABEL,
    "text.format.description": Ignored("the schema alone decides; put it into the instructions"),
    "text.format.strict": _STRICT,
    "text.verbosity": _VERBOSITY,
    "reasoning.effort": _EFFORT,
    "reasoning.summary": Ignored("reasoning comes whole, as `content`"),
    "reasoning.generate_summary": Ignored("reasoning comes whole, as `content`"),
    "reasoning.context": Unserved("open a session with a history_policy", ("auto",)),
    "reasoning.mode": Unserved("set reasoning.effort", ("standard",)),
    "include[]": Served(
        "reasoning is in `content`; the rest is of refused tools", _INCLUDED, "ask /v1/chat/completions for logprobs"
    ),
    "stream_options.include_obfuscation": _PADDING,
    "prompt_cache_options.prewarm": Unserved("ask for one token", (False,)),
    "truncation": Unserved("leave out older items in the client", ("disabled",)),
    "background": Unserved("ask for a stream", (False,)),
    "conversation": Unserved(_WHOLE),
    "prompt": Unserved(_WHOLE),
    "context_management": Unserved("leave out older items in the client", ([],)),
    "max_tool_calls": Unserved("it bounds tools that OpenAI runs; count calls in the client"),
    "top_logprobs": Unserved("ask /v1/chat/completions", (0,)),
    "image": Unserved("ask for text"),
    "moderation": Unserved("moderate in the client"),
}
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_SOURCES = Ignored("the text counts alone")
MESSAGES_FIELDS: Rules = {
    **SHARED,
    "max_tokens": Served("most tokens of an answer, its thought included; required"),
    "messages[].role": Served("", ("user", "assistant", "system"), "send one of these"),
    "messages[].content": Served("a text or blocks; a last assistant text begins the answer"),
    "messages[].content[].type": Served("", _BLOCKS, _NO_TEXT),
    "messages[].content[].text": _PARTS,
    "messages[].content[].cache_control": _CACHE,
    "messages[].content[].citations": _SOURCES,
    **dict.fromkeys((f"messages[].content[].{name}" for name in ("thinking", "signature", "data")), _THOUGHTS),
    "messages[].content[].id": Served("pairs a call with its result"),
    "messages[].content[].name": Served("as the template writes it"),
    "messages[].content[].input": Served("as the template writes it"),
    "messages[].content[].tool_use_id": Served("pairs a result with its call"),
    "messages[].content[].content": _PARTS,
    "messages[].content[].content[].type": Served("", ("text",), _NO_TEXT),
    "messages[].content[].content[].text": _PARTS,
    "messages[].content[].content[].cache_control": _CACHE,
    "messages[].content[].content[].citations": _SOURCES,
    "messages[].content[].is_error": Ignored("the model reads the content; say there that it failed"),
    "messages[].content[].caller.type": Served("", ("direct",), "have the model call the tool"),
    "messages[].content[].toolset_name": Unserved("name tools without toolsets", ("",)),
    "messages[].clear_at": Unserved("leave out the message in the client", ("never",)),
    "messages[].output_config": Unserved("set output_config of the request", ({},)),
    "system": _PARTS,
    "system[].type": Served("", ("text",), _NO_TEXT),
    "system[].text": _PARTS,
    "system[].cache_control": _CACHE,
    "system[].citations": _SOURCES,
    "stop_sequences": Served("up to 16 texts; the answer ends before the first, which a thought does not end by"),
    "tools[].type": Served("", ("custom",), "offer your tool with an input_schema, and run it in the client"),
    "tools[].name": Served("as the template shows it"),
    "tools[].description": Served("as the template shows it"),
    "tools[].input_schema": Served("as the template shows it"),
    "tools[].strict": _TOOL_STRICT,
    "tools[].cache_control": _CACHE,
    "tools[].eager_input_streaming": Ignored("a call comes whole"),
    "tools[].input_examples": Unserved("put examples into the description", ([],)),
    "tools[].allowed_callers": _DIRECT,
    "tools[].defer_loading": Unserved("offer the tools that the model needs", (False,)),
    "tool_choice.type": Served("`any` and `tool` sample calls alone (extra `shoal[serve]`)"),
    "tool_choice.name": Served("only calls of this tool are sampled"),
    "tool_choice.disable_parallel_tool_use": Served("the answer ends after its first call"),
    "thinking.type": Served(
        "arguments `thinking` and `enable_thinking` of the chat template",
        ("enabled", "disabled", "adaptive"),
        "send one of these",
    ),
    "thinking.budget_tokens": Ignored("max_tokens bounds the thought too"),
    "thinking.block_binding": _THOUGHTS,
    "thinking.display": Unserved("drop the thinking blocks in the client", ("summarized",)),
    "output_config.format.type": Served("", ("text", "json_object", "json_schema"), "send a JSON Schema"),
    "output_config.format.schema": _SCHEMA,
    "output_config.effort": _EFFORT,
    "output_config.task_budget": Unserved("set max_tokens, and count tokens in the client"),
    "container": Unserved(_RUN_TOOLS),
    "mcp_servers": Unserved(_RUN_TOOLS, ([],)),
    "context_management": Unserved("leave out older messages in the client"),
    "compaction": Unserved("leave out older messages in the client"),
    "fallbacks": Unserved("ask again in the client", ([],)),
    "thread": Unserved("send the whole conversation as messages"),
}
