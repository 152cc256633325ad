"""Prompts that show images, as vLLM is asked to continue them; and the probe of a model that reads them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.data import Prompt, Trajectory, UserError
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.dialect import Chunk, ServerFacts
from proxima.engine.http.generation_job import CompletionRules, GenerationJob
from proxima.engine.http.vllm import VllmDialect
from proxima.engine.http.weight_probe import perturbed, probe_tokens, trainer_log_prob
from proxima.engine.protocol import Request, Sampling
from proxima.model import Policy, load
from proxima.model.chat import prompt_tokens
from proxima.model.images import ImageStore, ImageTokenizer
from proxima.model.pretrained import beside_decoder, load_tokenizer
from tests.tiny_images import FAMILIES, make_tiny_reader, picture

CHAT = [{"role": "user", "content": "a <image> b <image> c"}]
PICTURES = [picture(0, 20, 28), picture(1, 40, 17)]


@pytest.fixture(params=FAMILIES)
def tokenizer(request, tmp_path):
    store = ImageStore(str(make_tiny_reader(request.param, tmp_path)))
    return ImageTokenizer(load_tokenizer(store.model), store)


def job_of(tokenizer):
    tokens = prompt_tokens(tokenizer.images.numbered(CHAT, PICTURES), tokenizer)
    rules = CompletionRules(tokenizer=tokenizer, stop_tokens=(0,), vocabulary=500, max_length=300)
    prompt = Prompt(uid=0, messages=(), tokens=tokens)
    job = GenerationJob(Request(prompt=prompt, sample=0, sampling=Sampling(max_tokens=4)), rules, lambda answer: None)
    job.begin(0)
    return job, tokens


def test_a_server_gets_what_the_template_writes_and_the_images(tokenizer):
    job, tokens = job_of(tokenizer)
    request = job.token_request("r", salt=None, seeded=False, chunk_tokens=1)
    image, texts = {"type": "image"}, [{"type": "text", "text": text} for text in ("a ", " b ", " c")]
    chat = [{"role": "user", "content": [texts[0], image, texts[1], image, texts[2]]}]
    template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert request.tokens == tokenizer(template, add_special_tokens=False)["input_ids"]
    assert request.read == len(tokens) > len(request.tokens)
    assert [address.partition(",")[0] for address in request.images] == ["data:image/png;base64"] * 2
    assert len(set(request.images)) == 2


def test_the_answer_repeats_the_whole_prompt(tokenizer):
    job, tokens = job_of(tokenizer)
    whole = np.where(tokens < 0, tokenizer.images.config.image_token_id, tokens).astype(np.int32)
    for prompt, accepted in ((whole, True), (whole[:-1], False)):
        answer = Chunk(
            tokens=np.array([5], np.int32),
            log_prob=np.array([-1.0], np.float32),
            finish_reason=None,
            prompt_tokens=prompt,
        )
        if accepted:
            assert job.append(answer, {}) is None
        else:
            with pytest.raises(WrongAnswerError, match="another prompt"):
                job.append(answer, {})


def test_tokens_that_were_changed_are_refused(tokenizer):
    _, tokens = job_of(tokenizer)
    place = int(np.flatnonzero(tokens < 0)[1])
    with pytest.raises(UserError, match="tokens around image 0 are not those"):
        tokenizer.images.folded(np.delete(tokens, place).tolist())


def test_vllm_is_sent_the_images_as_parts_of_the_content(tokenizer):
    job, _ = job_of(tokenizer)
    bodies = []

    class Client:
        url = "http://127.0.0.1:1"

        async def events(self, path, body, size):
            bodies.append(body)
            for event in ():
                yield event

    async def ask():
        request = job.token_request("r", salt="s", seeded=False, chunk_tokens=1)
        facts = ServerFacts(server="vLLM", model="m")
        return request, [chunk async for chunk in VllmDialect().stream(Client(), facts, request)]

    request, chunks = asyncio.run(ask())
    assert chunks == []
    assert [(part["type"], part["url"]) for part in bodies[0]["content_parts"]] == [
        ("image_url", address) for address in request.images
    ]
    assert bodies[0]["token_ids"] == request.tokens


def test_a_probe_leaves_the_policy_and_its_vision_tower_as_they_were(tokenizer):
    store = tokenizer.images
    policy = Policy(replace(load(store.model), images=store))
    prompts = (
        prompt_tokens(store.numbered(CHAT, PICTURES), tokenizer),
        prompt_tokens(CHAT[:1], load_tokenizer_of(store)),
    )
    answer = np.arange(3, 9, dtype=np.int32)
    rows = [Trajectory(group=n, prompt_tokens=prompt, tokens=answer) for n, prompt in enumerate(prompts)]
    with torch.no_grad():
        before = policy(policy.pack(rows)).log_prob
        eyes = {name: weight.clone() for name, weight in beside_decoder(policy.model).items()}
        tokens = probe_tokens(tokenizer, 40, 60)
        trainer_log_prob(policy.model, tokens)
        assert torch.equal(policy(policy.pack(rows)).log_prob, before)
    with perturbed(policy.model, tokens):
        moved = beside_decoder(policy.model)
        assert all(torch.equal(moved[name], weight) for name, weight in eyes.items())


def load_tokenizer_of(store):
    """The plain tokenizer, for which `<image>` is text, with a template that takes texts."""
    plain = load_tokenizer(store.model)
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return plain
