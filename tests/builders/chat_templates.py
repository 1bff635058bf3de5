"""Chat templates of seven families, written anew after the rules that their model cards and stock templates follow.

None marks its answers with `{% generation %}`, as the stock ones do not.

QWEN3    ChatML. An answer after the last question shows its reasoning, an earlier one does not; the last answer shows a
         think block even without reasoning. `enable_thinking=False` puts an empty one into the generation prompt.
         Tools stand in the system turn, calls in <tool_call>, results in a user turn.
LLAMA3   A header and a blank line before each trimmed text, <|eot_id|> behind it. One call per answer, results come from
         "ipython"; the date in the system turn is that of the day unless `date_string` is given: left out here.
GEMMA    Turns of "user" and "model" that must alternate, no system turn. An answer ends with <end_of_turn>, which is not
         the tokenizer's end token.
MISTRAL  [INST] and [/INST], no generation prompt, </s> behind an answer. Turns must alternate; the system text stands in
         the last question, wherever that is: so earlier turns are rendered differently once others follow.
GLM      No end token: an answer ends where <|user|> or, after calls, <|observation|> begins the next turn. Reasoning stands
         in <think> of the answers after the last question, an empty block in those before.
GPT_OSS  Reads the reasoning from `thinking` and shows it in a channel of the last answer.
DEEPSEEK Joins the arguments of calls to text. R1 opens <think> in the prompt, and takes the reasoning out of answers.
"""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tests.builders.tiny_chat_model import make_tokenizer


class Family(NamedTuple):
    """A template and the special tokens it needs; `end` is the tokenizer's own end token."""

    template: str
    special_tokens: tuple[str, ...]
    end: str

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return make_tokenizer(self.template, self.special_tokens, self.end)


QWEN3 = Family(
    """
{%- set place = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set place.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > place.question and (loop.last or m.reasoning_content) -%}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

LLAMA3 = Family(
    """
{{- '<|begin_of_text|>' }}
{%- for m in messages -%}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call only') }}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{ '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else -%}
{{ m.content | trim }}
{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
)

_ALTERNATE = """
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('turns must alternate') }}{%- endif -%}
"""

GEMMA = Family(
    """
{{- '<bos>' }}
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turn') }}{%- endif -%}
{%- for m in messages -%}"""
    + _ALTERNATE
    + """
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
)

MISTRAL = Family(
    """
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- set turns = messages[1:] if system else messages -%}
{{- '<s>' }}
{%- set place = namespace(question=-1) -%}
{%- for m in turns -%}{%- if m.role == 'user' -%}{%- set place.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in turns -%}"""
    + _ALTERNATE
    + """
{%- if m.role == 'user' -%}
{{- '[INST] ' + (system + '\n\n' if system and loop.index0 == place.question else '') + m.content + '[/INST]' }}
{%- else -%}
{{- ' ' + m.content + '</s>' }}
{%- endif -%}
{%- endfor -%}
""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "</s>",
)

GLM = Family(
    """
{{- '[gMASK]<sop>' }}
{%- if tools -%}{{ '<|system|>\nTools:' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{%- endif -%}
{%- set place = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set place.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|assistant|>' }}
{%- if loop.index0 > place.question and m.reasoning_content -%}
{{ '\n<think>\n' + m.reasoning_content.strip() + '\n</think>\n\n' }}
{%- else -%}
{{ '\n<think></think>\n' }}
{%- endif -%}
{{ m.content.strip() }}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}
{%- endfor -%}
{{ '\n</tool_call>' }}
{%- endfor -%}
{%- else -%}
{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ '\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
""",
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "<|endoftext|>",
)

GPT_OSS = Family(
    """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if 'thinking' in m and loop.last and not add_generation_prompt -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else -%}
{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
""",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    "<|return|>",
)

_DEEPSEEK = """
{{- '<|begin|>' }}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|Assistant|>' + (m.content.split('</think>')[-1] if m.content else '') }}
{%- for call in m.tool_calls or [] -%}
{{ '<|call|>' + call['type'] + '<|sep|>' + call['function']['name'] + '\n```json\n' + call['function']['arguments'] }}
{{- '\n```<|end of call|>' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- else -%}
{{ '<|User|>' if m.role == 'user' else '<|output|>' }}{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|Assistant|>PROMPT' }}{%- endif -%}
"""
_DEEPSEEK_TOKENS = ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|sep|>", "<|end of call|>", "<|output|>")
DEEPSEEK = Family(_DEEPSEEK.replace("PROMPT", ""), _DEEPSEEK_TOKENS, "<|end|>")
DEEPSEEK_R1 = Family(_DEEPSEEK.replace("PROMPT", "<think>\\n"), _DEEPSEEK_TOKENS, "<|end|>")
