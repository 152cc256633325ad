"""The text of an answer is what the policy wrote: chat templates x stop strings x control tokens x prefilled
beginnings, for the engine in this process and for servers."""

import asyncio
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxima.data.flow import Completion
from proxima.engine.http.dialect import Chunk
from proxima.engine.http.generation_job import CompletionRules, GenerationJob
from proxima.engine.local import scheduler
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.local.sampler import Sampled
from proxima.engine.protocol import Request, Sampling
from proxima.model.chat.written_text import written_text
from proxima.reward.text import Exact, Format, Regex
from proxima.runtime.state.completion_columns import completion_row
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row
from tests.model.rows import loaded
from tests.tiny import CHAT_TEMPLATE, END, tiny_tokenizer

USER = {"role": "user", "content": "3 + 4?"}
HEADER = "<|im_start|>assistant\n"
ASSISTANT = "{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + WRITTEN + '<|im_end|>\n' }}{% else %}"
OTHER = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}"


def opening(text):
    return CHAT_TEMPLATE.replace("assistant\n' }}{% endif", f"assistant\n{text}' }}}}{{% endif")


def thinking(written):
    """As Qwen3.5's: a thought, maybe an empty one, before a last turn; the prompt opens it."""
    loop = "{% for message in messages %}" + ASSISTANT.replace("WRITTEN", written) + OTHER + "{% endfor %}"
    return loop + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"


LAST = thinking("('<think>\n\n</think>\n\n' if loop.last else '') + message.content")
EVERY = thinking("'<think>\n\n</think>\n\n' + message.content")
TURN = "'[INST] ' + m.content + ' [/INST]' if m.role != 'assistant' else m.content + '<|im_end|>'"
PLAIN = "{% for m in messages %}{{ " + TURN + " }}{% endfor %}"
NO_THOUGHT = "<think>\n\n</think>\n\n"
TEMPLATES = {  # the header before every answer, by which the text is found again
    "chatml": (CHAT_TEMPLATE, HEADER),
    "opens a thought": (opening("<think>\n"), HEADER),
    "opens and closes it": (opening(NO_THOUGHT), HEADER + NO_THOUGHT),
    "thought in a last turn": (LAST, HEADER),
    "thought in every turn": (EVERY, HEADER),
    "no header": (PLAIN, "[/INST]"),
    "none": (None, USER["content"] + "\n"),
}
STOPS = [(), ("</answer>",), ("answer>\n", "7</", "</answer>"), ("é",), ("no such text", ">\n", "r>")]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CONTROLS = {"ordinary": ((), ()), "control": (TAGS, ()), "over the end of a token": (TAGS[:2], ("r>\n", "7</a"))}
PREFILLS = ["", "Let me think.\n", "<think>\nSev"]
IDEAL = "<think>\nSeven, é.\n</think>\n<answer>7</answer>\n"


@cache
def tokenizer_of(controls, template):
    special, ordinary = CONTROLS[controls]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    tokenizer.chat_template = TEMPLATES[template][0]
    return tokenizer


@cache
def combinations():
    """(prompt, header, tokenizer, tokens that the policy wants to sample, stop strings) of each."""
    made = []
    for template, controls, stop, prefill in product(TEMPLATES, CONTROLS, STOPS, PREFILLS):
        tokenizer = tokenizer_of(controls, template)
        begun = [{"role": "assistant", "content": prefill}] if prefill else []
        if begun and template.startswith("thought in"):
            continue  # refused: the template closes a thought before it
        prompt = to_prompt(Row(messages=(USER, *begun), chat=True), len(made), tokenizer)
        wanted = IDEAL.removeprefix(prompt.begun)
        ids = tokenizer(wanted + END, add_special_tokens=False)["input_ids"]
        header = TEMPLATES[template][1]
        if prefill:
            header = header.removesuffix(NO_THOUGHT)  # which the template writes before no answer that is begun
        made.append((prompt, header, tokenizer, ids, stop))
    return made


def expected(prompt, header, tokenizer, tokens, stop):
    """The text between the header and the end of the turn in everything that the model read and wrote."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    read = tokenizer.decode(prompt.tokens, **options)
    answer = tokenizer.decode([*prompt.tokens, *tokens], **options)[read.rindex(header) + len(header) :]
    sampled = tokenizer.decode(tokens, **options)
    ends = [sampled.find(text) + len(text) for text in stop if text in sampled]
    if ends:
        return answer[: len(answer) - (len(sampled) - min(ends))]
    return answer.removesuffix(END)


def check(completion, case):
    prompt, header, tokenizer, ids, stop = case
    tokens = completion.tokens.tolist()
    assert tokens == ids[: len(tokens)] and completion.finish_reason == "stop"
    before = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
    assert not any(text in before for text in stop), "it went on after a stop string"
    assert completion.text == expected(prompt, header, tokenizer, tokens, stop)
    assert completion.text.startswith(prompt.begun) and completion_row(completion)["text"] == completion.text
    if tokens == ids or completion.text.endswith("</answer>"):  # no stop string has cut the answer
        ends = replace(completion, text=completion.text.strip())
        assert Regex().score_one(replace(prompt, answer="7"), ends).value == 1.0
        if completion.text.startswith("<think>"):
            assert Format().score_one(prompt, ends).value == 1.0


def test_there_are_enough_of_them():
    assert len(combinations()) >= 200
    begun = {prompt.begun for prompt, *_ in combinations()}
    assert begun == {"", "<think>\n", "Let me think.\n", "<think>\nSev"}


@pytest.mark.slow
def test_the_local_engine_gives_what_was_sampled(monkeypatch):
    script = []

    def scripted(logits, *arguments, **options):
        token = torch.tensor([script.pop(0)])
        return Sampled(
            {"tokens": token, "sampled_log_prob": -torch.ones(1), "untruncated_log_prob": -torch.ones(1)}, []
        )

    monkeypatch.setattr(scheduler, "sample_tokens", scripted)
    model = loaded("llama")
    model.model.resize_token_embeddings(300, mean_resizing=False)
    engine = LocalEngine(model, Local(dtype="float32", slots=1))
    for case in combinations():
        prompt, _, tokenizer, ids, stop = case
        engine.scheduler.tokenizer = tokenizer
        script[:] = ids
        (completion,) = asyncio.run(collect(engine, [Request(prompt=prompt, sample=0, sampling=Sampling(stop=stop))]))
        check(completion, case)


@pytest.mark.parametrize("seam", [0, 1, 9])
def test_servers_give_what_was_sampled(seam):
    """A server that stops as vLLM and SGLang do: at the token that completes a stop string, control tokens included."""
    for case in combinations():
        prompt, _, tokenizer, ids, stop = case
        given = []
        rules = CompletionRules(tokenizer=tokenizer, stop_tokens=(0,), vocabulary=300, max_length=4096)
        job = GenerationJob(Request(prompt=prompt, sample=0, sampling=Sampling(stop=stop)), rules, given.append)
        texts = (tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(1, len(ids) + 1))
        count = next((i for i, text in enumerate(texts, 1) if any(s in text for s in stop)), len(ids))
        parts = [ids[:seam], ids[seam:count]] if 0 < seam < count else [ids[:count]]
        for number, part in enumerate(parts):
            job.begin(number)
            end = "stop" if number == len(parts) - 1 else None
            job.append(Chunk(tokens=part, log_prob=[-1.0] * len(part), finish_reason=end), {})
            if end is None:
                job.keep()
        job.finish("stop")
        check(given[0], case)


# ---- the end of a text -----------------------------------------------------------------------------------------------


OPENINGS = [  # a thought as models open and close it
    ("<think>\n", "</think>\n\n"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>\n\n", "<|end_of_thought|>\n\n"),
    ("<scratchpad>\n", "</scratchpad>\n"),
    ("<analysis>", "</analysis>"),
]


@pytest.mark.parametrize(("opened", "closed"), OPENINGS)
def test_a_thought_that_the_template_opens_is_of_the_answer_and_one_that_it_closes_is_not(opened, closed):
    def begun(template):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        return to_prompt(Row(messages=(USER,), chat=True), 0, tokenizer).begun

    def in_every_turn(text):
        written = ASSISTANT.replace("WRITTEN", f"{text!r} + message.content")
        loop = "{% for message in messages %}" + written + OTHER + "{% endfor %}"
        return loop + "{% if add_generation_prompt %}{{ '" + HEADER + text + "' }}{% endif %}"

    for template in (opening, in_every_turn):
        assert begun(template(opened)) == opened
        assert begun(template(opened + closed)) == ""


def test_only_the_token_that_ended_the_turn_is_left_out():
    tokenizer = tokenizer_of("control", "chatml")
    ids = tokenizer("<think>7</think><|im_start|>", add_special_tokens=False)["input_ids"]
    end, closing = 0, tokenizer.convert_tokens_to_ids("</answer>")
    assert written_text(tokenizer, [*ids, end], ends={end}).text == "<think>7</think><|im_start|>"
    assert written_text(tokenizer, ids, ends={end}).text == "<think>7</think><|im_start|>"
    assert written_text(tokenizer, [*ids, closing], ends={end, closing}).text.endswith("</answer>"), "content"
    letter = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert written_text(tokenizer, letter, ends=set(letter)).text == "x", "a stop token that is no control token"


def test_a_text_that_its_length_has_cut_ends_anywhere():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab é", add_special_tokens=False)["input_ids"]
    assert written_text(tokenizer, ids[:-1], begun="<think>").text == "<think>ab �"
    assert written_text(tokenizer, [], begun="<think>").text == "<think>"


def test_spaces_are_as_sampled():
    """Some tokenizers drop the space before the first token of a text, and clean spaces before punctuation."""
    words = {"<s>": 0, "▁": 1, "a": 2, "▁answer": 3, "▁is": 4, "▁7": 5, "▁.": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>", clean_up_tokenization_spaces=True)
    assert written_text(fast, [5, 6]).text == "7 ."
    assert written_text(fast, [5, 6], begun="The answer is").text == "The answer is 7 ."


@pytest.mark.parametrize(
    ("stop", "text", "by"),
    [
        (("d", "bc"), "xabc", "bc"),  # the first that is complete
        (("cd", "bcd"), "xabcd", "bcd"),  # of two that end together, the longer
        (("e", "x"), "xabcde", "e"),  # what the prompt has is not searched
        (("f",), "xabcdeé", ""),
    ],
)
def test_a_stop_string_ends_the_text_and_stays_in_it(stop, text, by):
    ids = tiny_tokenizer()("abcdeé", add_special_tokens=False)["input_ids"]
    written = written_text(tiny_tokenizer(), ids, begun="x", stop=stop)
    assert written == (text, by)


def test_rewards_of_the_whole_text_leave_out_the_prompts_part_and_the_stop_string():
    prompt = replace(combinations()[0][0], begun="The sum is ", answer="7")
    completion = replace(Completion.of_text(0, 0, "The sum is 7 ###", np.arange(3)), stopped_by="###")
    assert Exact().score_one(prompt, completion).value == 1.0
    assert completion.own_text(prompt.begun) == "7 "
