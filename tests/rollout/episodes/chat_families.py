"""Families of chat templates, in the style of their models, on one small tokenizer with merges.

What differs between them is what matters to a conversation: how a turn ends, what follows it, whether contents are
trimmed, whether earlier thoughts are removed, whether the generation prompt stays, how tools and their answers are
shown."""

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """The quick brown fox jumps over the lazy dog. <think>\nHm, 7 + 5 = 12.\n</think>\n\nIt is 12.
<tool_call>\n{"name": "search", "arguments": {"query": "the dog"}}\n</tool_call>\n\n\n    return  value;\t// ok
user\nassistant\nsystem\ntool\nipython <tool_response>\nright\n</tool_response> Größe naïve 東京 тест 🙂🙃 𝔘𝔫𝔦
[INST] [/INST] <user>\n</user>\n<assistant>\n</assistant>\n . , ; ! ? ' " ( ) { } [ ] ' d 's 't I'm you're"""

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call functions, given in <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nWrite <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>tool\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content | trim %}{%- endif %}
{%- if ns.system or tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- ns.system + '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}{%- if not (loop.first and m.role == 'system') %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Qwen2.5 joins the answers of several tools into one message of the user; Qwen3 also removes thoughts before the last
# question of a user and writes those behind it in one form.
QWEN = """\
{{- '<|im_start|>system\\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' }}
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role == 'assistant' %}ASSISTANT
{%- elif not (loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN25 = QWEN.replace("ASSISTANT", "{{- '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}")
QWEN3 = QWEN.replace(
    "ASSISTANT",
    """
{%- set content = m.content %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}""",
)
# Qwen3 with enable_thinking=false: an empty thought that the history lacks.
QWEN3_OFF = QWEN3.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}")
# As R1's: a turn begins within a thought, and the history has nothing up to its end.
THINKS = QWEN.replace(
    "ASSISTANT", "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] | trim + '<|im_end|>\\n' }}"
).replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")

MISTRAL = """\
{{- bos_token }}{%- set ns = namespace(first=true) %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if ns.first and tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' }}
{%- if ns.first and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{%- set ns.first = false %}{{- m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"""
# As Mistral's third: the tools stand in front of the last question.
MISTRAL_LAST = MISTRAL.replace(
    "{%- for m in messages %}",
    "{%- set of = messages | selectattr('role', 'equalto', 'user') | list | length %}"
    "{%- set ns = namespace(first=true, asked=0) %}{%- for m in messages %}",
    1,
).replace("{%- if ns.first and tools %}", "{%- set ns.asked = ns.asked + 1 %}{%- if ns.asked == of and tools %}")

XML = """\
{%- for tool in tools or [] %}{{- '<tool>' + (tool | tojson) + '</tool>\\n' }}{%- endfor %}
{%- for m in messages %}{{- '<' + m.role + '>\\n' + m.content + '\\n</' + m.role + '>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>\\n' }}{%- endif %}"""

# As Llama-3 and Qwen split a text; unlike GPT-2's, line ends before a word stay together.
WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """A chat template with its control tokens.

    Args:
        end: the control token that the template writes behind a message of the model; empty: none.
        eos: what ends the model's turn.
    """

    name: str
    template: str | None
    control: tuple[str, ...]
    end: str
    eos: str


QWEN_CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3_CONTROL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
MISTRAL_CONTROL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
MISTRAL_CONTROL += ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
CHATMLS = {"chatml": CHATML, "qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3-off": QWEN3_OFF, "thinks": THINKS}
FAMILIES = (
    *(Family(name, template, QWEN_CONTROL, "<|im_end|>", "<|im_end|>") for name, template in CHATMLS.items()),
    Family("llama3", LLAMA3, LLAMA3_CONTROL, "<|eot_id|>", "<|eot_id|>"),
    Family("mistral", MISTRAL, MISTRAL_CONTROL, "</s>", "</s>"),
    Family("mistral-last", MISTRAL_LAST, MISTRAL_CONTROL, "</s>", "</s>"),
    Family("xml", XML, ("<|endoftext|>",), "", "<|endoftext|>"),
    Family("none", None, ("<|endoftext|>",), "", "<|endoftext|>"),  # a base model; counts as one, with `xml`
)


@cache
def _trained() -> str:
    """A byte-level BPE with merges of `TEXT`, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def family_tokenizer(family: Family, base: Tokenizer | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that speaks a family's template; `base`: another vocabulary, to which its control tokens are added.
    Thoughts and tool calls have tokens of their own in Qwen3, which are not control tokens."""
    tokenizer = base or Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.control])
    if family.name.startswith(("qwen3", "thinks")):
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    begin = {"bos_token": family.control[0]} if family.control[0] in ("<|begin_of_text|>", "<s>") else {}
    about = {"eos_token": family.eos, "clean_up_tokenization_spaces": False, **begin}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **about)
    fast.chat_template = family.template
    return fast


def speaker(name: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, with a template of its own."""
    tokenizer = family_tokenizer(next(family for family in FAMILIES if family.name == name))
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer
