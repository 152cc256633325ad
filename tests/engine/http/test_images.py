"""Prompts that show images, as vLLM is asked to continue them; and the probe of a model that reads them."""

import asyncio
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from proxima.data import UserError
from proxima.data.flow import Prompt
from proxima.data.trajectory import Trajectory
from proxima.engine.http.answer_checks import WrongAnswerError
from proxima.engine.http.dialect import Chunk, ServerFacts, WrittenTokens
from proxima.engine.http.generation_job import CompletionRules, GenerationJob
from proxima.engine.http.vllm import VllmDialect
from proxima.engine.http.weights.probe import (
    Bound,
    copy_bound,
    first_compared,
    perturbed,
    probe_tokens,
    trainer_log_prob,
)
from proxima.engine.protocol import Request, Sampling
from proxima.model.architecture import vision_parameters
from proxima.model.chat.encode import prompt_tokens
from proxima.model.images.image_store import ImageStore
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.model.pretrained import load_tokenizer
from tests.campaigns import campaign
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.test_weight_probe import ModelServer, push, syncing
from tests.tiny_images import FAMILIES, make_tiny_reader, picture

FACTS = ServerFacts(server="vLLM", model="m", dtype="float32")
UNREAD = (
    "k_proj.bias",  # a softmax does not see a constant added to the keys' scores
    "vision_tower.head",  # Gemma 3 pools in its connector
    "deepstack_merger_list.1",  # added after the last layer, where no text token reads it any more
    "layers.1.self_attn.q_proj.bias",  # of these random weights: the keys are nearly equal
)
SMALL = ("gemma3", "idefics3", "qwen3_vl")  # of all families, which differ in the tokens around an image
PROBED = "test_a_stale_part_of_the_vision_tower_is_found_by_the_probe"


def families(sibling):
    others = [kind for kind in FAMILIES if kind not in SMALL]
    return [*SMALL, *campaign(f"tests/engine/http/test_images.py::{sibling}", others)]


CHAT = [{"role": "user", "content": "a <image> b <image> c"}]
PICTURES = [picture(0, 20, 28), picture(1, 40, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of each family's tiny model."""
    return cache(lambda kind: str(make_tiny_reader(kind, tmp_path_factory.mktemp(kind))))


@pytest.fixture(params=families("test_a_server_gets_what_the_template_writes_and_the_images"))
def tokenizer(request, folder):
    return ImageStore(folder(request.param)).tokenizer


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

    def append(prompt):
        return job.append(Chunk(tokens=np.int32([5]), log_prob=np.float32([-1.0]), prompt_tokens=prompt), {})

    assert append(whole) is None
    with pytest.raises(WrongAnswerError, match="another prompt"):
        append(whole[:-1])


@pytest.mark.parametrize("lines", [("\n\n",), ("\n\n", "\n\n\n", "\n\n\n\n")])
@pytest.mark.parametrize("tokenizer", ["gemma3"], indirect=True)
def test_line_ends_that_were_joined_with_those_around_an_image_are_parted(tokenizer, lines):
    tokenizer.plain.add_tokens([*lines, "\n"])
    store = tokenizer.images
    for text in ("a\n<image>b", "\n\n<image>\n", "<image><image>\nc", "<image> d\n<image>"):
        count = text.count("<image>")
        (message,) = store.numbered([{"role": "user", "content": text}], PICTURES[:count])
        written, shown = store.folded(prompt_tokens([message], tokenizer).tolist())
        parts = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in split(text)]
        chat = [{"role": "user", "content": parts}]
        template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer.plain.decode(written) == template and len(shown) == count
        assert len(written) <= len(tokenizer(template, add_special_tokens=False)["input_ids"]) + count


def split(text):
    return [part for part in re.split("(<image>)", text) if part]


def test_tokens_that_were_changed_are_refused(tokenizer):
    _, tokens = job_of(tokenizer)
    place = int(np.flatnonzero(tokens < 0)[1])
    with pytest.raises(UserError, match="tokens around image 0 are not those"):
        tokenizer.images.folded(np.delete(tokens, place).tolist())


def test_vllm_is_sent_the_images_as_parts_of_the_content(tokenizer):
    job, _ = job_of(tokenizer)
    request, fake = job.token_request("r", salt="s", seeded=False, chunk_tokens=1), FakeVllm()

    async def ask():
        return [chunk async for chunk in VllmDialect().stream(fake.client(), FACTS, request)]

    assert len(asyncio.run(ask())) == 1
    ((_, body),) = fake.calls
    assert [(part["type"], part["url"]) for part in body["content_parts"]] == [
        ("image_url", address) for address in request.images
    ]
    assert body["token_ids"] == request.tokens


def test_what_a_model_wrote_is_not_taken_for_an_image(tokenizer):
    _, prompt = job_of(tokenizer)
    store = tokenizer.images
    with pytest.raises(UserError, match="which a server would take for an image"):
        store.folded([*prompt.tolist(), tokenizer.convert_tokens_to_ids(store.placeholder)])


@pytest.mark.slow
def test_a_probe_leaves_the_policy_and_its_vision_tower_as_they_were(tokenizer):
    store = tokenizer.images
    policy = Policy(replace(load(store.model), tokenizer=tokenizer))
    prompts = (
        prompt_tokens(store.numbered(CHAT, PICTURES), tokenizer),
        prompt_tokens(CHAT[:1], load_tokenizer_of(store)),
    )
    answer = np.arange(3, 9, dtype=np.int32)
    rows = [Trajectory(group=n, prompt_tokens=prompt, tokens=answer) for n, prompt in enumerate(prompts)]
    with torch.no_grad():
        before = policy(policy.pack(rows)).log_prob
        eyes = {name: weight.clone() for name, weight in vision_parameters(policy.model).items()}
        tokens = probe_tokens(tokenizer, 40, 200)
        first = first_compared(tokens)
        known = Trajectory(group=0, prompt_tokens=tokens[:first], tokens=tokens[first:])
        of_policy = policy(policy.pack([known])).log_prob.numpy()
        of_probe = trainer_log_prob(policy.model, tokens, images=store)
        np.testing.assert_allclose(of_probe, of_policy, atol=1e-5)
    with perturbed(policy.model, tokens, store):
        pass
    with torch.no_grad():
        assert torch.equal(policy(policy.pack(rows)).log_prob, before)
    assert all(torch.equal(weight, eyes[name]) for name, weight in vision_parameters(policy.model).items())


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", families(PROBED), indirect=True)
def test_a_stale_part_of_the_vision_tower_is_found_by_the_probe(tokenizer):
    store = tokenizer.images
    model = load(store.model).model
    tokens, bound = probe_tokens(tokenizer, 40, 200), copy_bound(FACTS, None, rounds=Bound(0, 0))
    own = {name: weight.detach().clone() for name, weight in vision_parameters(model).items()}
    with perturbed(model, tokens, store):
        expected, missed = trainer_log_prob(model, tokens, images=store), []
        for name, weight in vision_parameters(model).items():
            moved = weight.detach().clone()
            with torch.no_grad():
                weight.copy_(own[name])
                away = np.abs(trainer_log_prob(model, tokens, images=store) - expected)
                weight.copy_(moved)
            missed += [name] if away.mean() <= bound.mean and away.max() <= bound.largest else []
        assert own
    assert [name for name in missed if not any(part in name for part in UNREAD)] == []


class Remembers(ModelServer):
    """A server that keeps what its vision tower made of an image until it is told to forget it."""

    forgets, eyes = True, None

    async def forget_images(self, client, facts):
        self.eyes = None if self.forgets else self.eyes

    async def score(self, client, facts, given, first):
        assert len(given.images) == 1 and len(given.read) == len(self.tokens) and first == first_compared(self.tokens)
        tower = vision_parameters(self.model)
        now = {name: weight.detach().clone() for name, weight in tower.items()}
        self.eyes = self.eyes or now
        put(tower, self.eyes)
        values = trainer_log_prob(self.model, self.tokens, images=self.images)
        put(tower, now)
        return values


def put(tower, values):
    with torch.no_grad():
        for name, weight in tower.items():
            weight.copy_(values[name])


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["idefics3"], indirect=True)
@pytest.mark.parametrize("forgets", [True, False])
async def test_a_server_forgets_the_images_that_earlier_weights_have_seen(tokenizer, forgets):
    loaded = replace(load(tokenizer.images.model), tokenizer=tokenizer)
    server = Remembers(loaded)
    server.forgets, server.images = forgets, tokenizer.images
    async with syncing(loaded) as sync:
        server.tokens = sync._tokens
        if forgets:
            report = await push(sync, server, loaded.model)
            assert report["probe_max"] < 1e-5 and report["perturbed_max"] < 1e-4
        else:
            with pytest.raises(UserError, match="does not compute with the weights of version 0"):
                await push(sync, server, loaded.model)


def test_vllm_scores_tokens_after_and_around_images(tokenizer):
    _, prompt = job_of(tokenizer)
    tokens = np.concatenate([np.int32([5, 6]), tokenizer.images.tokens(1), np.int32([7])])
    shown = WrittenTokens.of(np.concatenate([prompt, tokens]), tokenizer)

    class Client:
        url = "http://127.0.0.1:1"

        async def post(self, path, body, size):
            assert body["token_ids"] == shown.written and len(body["content_parts"]) == len(shown.images) == 3
            return {"prompt_logprobs": [None, *({str(t): {"logprob": -t / 8}} for t in shown.read[1:].tolist())]}

    values = asyncio.run(VllmDialect().score(Client(), FACTS, shown, len(prompt)))
    assert values.tolist() == [-token / 8 for token in shown.read[len(prompt) :].tolist()]
    assert (values[[0, 1, -1]] == [-5 / 8, -6 / 8, -7 / 8]).all()


def load_tokenizer_of(store):
    """The plain tokenizer, for which `<image>` is text, with a template that takes texts."""
    plain = load_tokenizer(store.model)
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return plain
