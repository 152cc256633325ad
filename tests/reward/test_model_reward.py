"""The reward `model`: Hugging Face's own scores, in the thread of the tensor work, and what has no score."""

import asyncio
import shutil
import threading
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from proxima.data import FieldError, UserError
from proxima.data.flow import Prompt
from proxima.model.compute_thread import ComputeThread
from proxima.model.load import save
from proxima.model.scalar_model import load_scalar_model, set_score_normalization
from proxima.reward.model_reward import ModelReward
from proxima.reward.runner import RewardRunner
from tests.reward.make import completion, completions, runner
from tests.tiny import CONTEXT, tiny_tokenizer

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})
TEXTS = ("4", "It is 4.", "five", "")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    loaded = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.3, seed=2)
    return str(save(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("reward-model")))


def exact(folder, **fields) -> ModelReward:
    return ModelReward(path=folder, compute_dtype="float32", device="cpu", **fields)


@cache
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    tokens = tokenizer().apply_chat_template(list(MESSAGES), add_generation_prompt=True)["input_ids"]
    return Prompt(uid=3, messages=MESSAGES, tokens=np.array(tokens, np.int32))


def answered(*texts, end: bool = True):
    """Completions with their real tokens."""
    out = []
    for i, text in enumerate(texts):
        tokens = [*tokenizer()(text)["input_ids"], *([0] if end else [])]
        made = completion(text, tokens=len(tokens), sample=i)
        out.append(replace(made, tokens=np.array(tokens, np.int32), finish_reason="stop" if end else "length"))
    return out


def theirs(folder, prompt, answers) -> list[float]:
    return logits(folder, [[*prompt.tokens, *answer.tokens] for answer in answers])


def logits(folder, rows) -> list[float]:
    """Hugging Face's own forward, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("encode", ["tokens", "text"])
@pytest.mark.parametrize("end", [True, False])
def test_the_score_is_hugging_faces_of_prompt_and_completion(folder, prompt, encode, end):
    answers = answered(*TEXTS, end=end)
    expected = theirs(folder, prompt, answers)
    assert np.std(expected) > 0.1
    for budget in (8192, 20):
        reward = exact(folder, encode=encode, tokens_per_forward=budget, end_truncated=False)
        scores = reward.score(prompt, answers)
        assert [score.value for score in scores] == pytest.approx(expected, abs=3e-5)
        assert all(score.valid and score.correct is None for score in scores)


@pytest.mark.slow
@pytest.mark.parametrize("encode", ["tokens", "text"])
def test_a_truncated_completion_is_scored_as_if_it_ended_there(folder, prompt, encode):
    """Reward models are trained on completions that end, and have no opinion of others."""
    cut, whole = answered(*TEXTS, end=False), answered(*TEXTS)
    reward = exact(folder, encode=encode)
    values = [score.value for score in reward.score(prompt, cut)]
    assert values == pytest.approx(theirs(folder, prompt, whole), abs=3e-5)
    assert values == [score.value for score in reward.score(prompt, whole)]
    full = len(prompt.tokens) + len(cut[0].tokens)
    (score,) = exact(folder, encode=encode, max_tokens=full).score(prompt, cut[:1])  # no room for one more
    assert score.value == pytest.approx(theirs(folder, prompt, cut[:1])[0], abs=3e-5)


def test_text_is_read_by_the_reward_models_own_template(folder, prompt):
    """Whatever the policy's tokens are."""
    answers = answered(*TEXTS)
    other = [replace(answer, tokens=np.full_like(answer.tokens, 9)) for answer in answers]
    without = replace(prompt, tokens=np.array([], np.int32))
    own, scores = (exact(folder, encode="text").score(*both) for both in ((prompt, answers), (without, other)))
    assert own == scores


def test_a_template_that_joins_prompt_and_answer_reads_as_hugging_face(folder, prompt, tmp_path):
    """As one whose generation prompt opens a thought that no finished turn shows."""
    shutil.copytree(folder, tmp_path / "joined")
    file = tmp_path / "joined" / "chat_template.jinja"
    file.write_text(file.read_text() + "{% if add_generation_prompt %}<think>{% endif %}")
    joined = AutoTokenizer.from_pretrained(tmp_path / "joined")
    chats = [[*MESSAGES, {"role": "assistant", "content": text}] for text in ("4", "no")]
    rows = [joined.apply_chat_template(chat)["input_ids"][:-1] for chat in chats]  # up to the end of the turn
    scores = exact(str(tmp_path / "joined"), encode="text").score(prompt, answered("4", "no"))
    assert [score.value for score in scores] == pytest.approx(logits(folder, rows), abs=3e-5)


@pytest.mark.slow
def test_a_completion_that_is_too_long_has_no_score(folder, prompt):
    answers = answered("4", "x" * 60, "5", "x" * CONTEXT)
    size = len(prompt.tokens)
    with runner(exact(folder, max_tokens=size + 20)) as made:
        scores = asyncio.run(made.score(prompt, answers))
    assert [score.valid for score in scores] == [True, False, True, False]
    assert scores[1].error == f"model: prompt and completion have {size + 61} tokens, the limit is {size + 20}"
    assert scores[0].value == pytest.approx(theirs(folder, prompt, answers[:1])[0], abs=3e-5)
    assert "the limit is 256" in exact(folder).score(prompt, answers)[3].error


@pytest.mark.slow
def test_normalised_scores(folder, prompt, tmp_path):
    loaded = load_scalar_model(folder, device="cpu")
    set_score_normalization(loaded.model.config, -0.5, 2.0)
    normal = str(save(loaded.model, loaded.tokenizer, tmp_path))
    answers = answered(*TEXTS)
    raw, scaled = exact(normal).score(prompt, answers), exact(normal, normalize=True).score(prompt, answers)
    assert [score.value for score in scaled] == pytest.approx([(score.value + 0.5) / 2 for score in raw])
    exact(normal, normalize=True).check()
    with pytest.raises(FieldError, match="normalize=True .* holds no mean and deviation of its scores; train it with"):
        exact(folder, normalize=True).check()


def test_what_can_not_score_is_refused_before_the_run(folder, tiny_model):
    missing = pytest.raises(UserError, match="reward 'model': path=.*has no")
    with runner(exact(str(tiny_model("qwen3")))) as made, missing:
        made.check()
    exact(folder).check()
    exact(folder).check_vocabulary(tokenizer())
    other = tiny_tokenizer()
    other.add_tokens(["new"])
    message = r"encode='tokens' needs the policy's vocabulary, and 1 of its .*; set encode=t"
    with pytest.raises(FieldError, match=message):
        exact(folder).check_vocabulary(other)
    exact(folder, encode="text").check_vocabulary(other)
    for fields, message in (
        ({"max_tokens": 1}, "max_tokens=1 must be >= 2"),
        ({"encode": "ids"}, "encode='ids' must be tokens or text"),
        ({"device": "tpu"}, "device='tpu' is not a device of proxima; write auto, cpu, cuda or cuda:1"),
        ({"device": "cuda:99"}, r"device='cuda:99' this machine has \d+ CUDA .*; set device=cpu, or auto"),
    ):
        with pytest.raises(FieldError, match=message):
            ModelReward(path=folder, **fields).check()


def test_the_model_runs_in_the_thread_of_the_tensor_work(folder, prompt, monkeypatch):
    """Weights are loaded once, before the first score, and frozen; both in that thread."""
    compute, reward, seen = ComputeThread(), exact(folder), []
    plain = type(reward).score

    def scored(*given):
        seen.append(threading.current_thread())
        return plain(*given)

    monkeypatch.setattr(type(reward), "score", scored)

    async def run():
        made = RewardRunner([reward], compute=compute)
        try:
            made.start()
            assert not any(p.requires_grad for p in reward._scorer.model.parameters())
            return await made.score(prompt, answered(*TEXTS))
        finally:
            made.close()

    assert all(score.valid for score in compute.serve(run()))
    assert seen == [threading.main_thread()]
    assert hash(reward) == hash(exact(folder)) and reward == exact(folder)


def test_a_prompt_without_tokens_fails_its_completions_only(folder):
    with runner(exact(folder)) as made:
        empty = Prompt(uid=1, messages=MESSAGES, tokens=np.array([], np.int32))
        scores = asyncio.run(made.score(empty, completions("a", "b")))
    assert not any(score.valid for score in scores) and "set encode=text" in scores[0].error
