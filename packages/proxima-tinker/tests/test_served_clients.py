"""What a program of the SDK does, against a server in this process."""

import pickle

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from .data_of_clients import example, examples, new_model

pytestmark = pytest.mark.slow

ADAM = types.AdamParams(learning_rate=0.01)
PROMPT = [7, 8, 9, 10, 11]


def log_probs(result):
    return [np.array(out["logprobs"].data, np.float32) for out in result.loss_fn_outputs]


def trained(trainer, steps=3, loss="cross_entropy", seeds=range(6)):
    """The losses of some steps."""
    out = []
    for _ in range(steps):
        passed, stepped = trainer.forward_backward(examples(loss, seeds), loss), trainer.optim_step(ADAM)
        out.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    return out


def test_a_model_learns_its_examples(trainer):
    losses = trained(trainer, 5)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    info = trainer.get_info()
    assert info.model_name == "tests/tiny" and info.is_lora and info.lora_rank == 4


def test_a_sampler_has_its_moments_weights_and_the_trainers_log_probs(trainer):
    trained(trainer)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=12, seed=5)
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, settings).result()
    trained(trainer, 1, seeds=range(20, 26))
    again = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, settings).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
    later = trainer.save_weights_and_get_sampling_client().result()
    changed = later.sample(types.ModelInput.from_ints(PROMPT), 3, settings).result()
    assert [s.logprobs for s in changed.sequences] != [s.logprobs for s in answer.sequences]
    for sequence in changed.sequences:
        tokens = [*PROMPT, *sequence.tokens]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
        )
        (own,) = log_probs(trainer.forward([datum], "cross_entropy").result())
        np.testing.assert_allclose(own[len(PROMPT) - 1 :], sequence.logprobs, atol=1e-5)
        assert len(set(sequence.sequence_id.split(":"))) > 1


def test_prompts_are_scored(trainer):
    trained(trainer, 1)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([*PROMPT, 20, 21])
    params = types.SamplingParams(max_tokens=2, seed=0)
    answer = sampler.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2
    ).result()
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == 7
    assert sampler.compute_logprobs(prompt).result() == answer.prompt_logprobs
    for position, likely in enumerate(answer.topk_prompt_logprobs[1:], 1):
        values = [value for _, value in likely]
        assert values == sorted(values, reverse=True)
        ids = dict(likely)
        token = [*PROMPT, 20, 21][position]
        assert ids.get(token, answer.prompt_logprobs[position]) == answer.prompt_logprobs[position]
    (sequence,) = answer.sequences
    for token, value, likely in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(likely) == 2 and dict(likely).get(token, value) == pytest.approx(value, abs=1e-5)
    targets = types.TensorData.from_numpy(np.array([[token, -1] for token in [*PROMPT[1:], 20, 21]]))
    scored = sampler.sample(prompt, 1, params, target_prompt_logprobs=targets).result().target_prompt_logprobs
    np.testing.assert_allclose(scored.to_numpy()[:, 0], answer.prompt_logprobs[1:], atol=1e-6)
    assert (scored.to_numpy()[:, 1] == 0).all()
    last = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert last.prompt_logprobs[:5] == [None] * 5
    np.testing.assert_allclose(last.prompt_logprobs[5:], answer.prompt_logprobs[5:], atol=1e-6)


def test_stops_and_seeds(served):
    sampler = served.client().create_sampling_client(base_model="tests/tiny").result()
    prompt = types.ModelInput.from_ints(PROMPT)

    def sampled(sampler=sampler, **settings):
        params = types.SamplingParams(max_tokens=40, **settings)
        return [(s.tokens, s.stop_reason) for s in sampler.sample(prompt, 2, params).result().sequences]

    free = sampled(seed=1, stop=[])
    assert free == sampled(seed=1, stop=[]) and free != sampled(seed=2, stop=[])
    assert sampled(pickle.loads(pickle.dumps(sampler)), seed=1, stop=[]) == free  # as for another process
    assert sampled(stop=[]) != sampled(stop=[])  # each request draws anew
    assert [len(tokens) for tokens, _ in free] == [40, 40] and {reason for _, reason in free} == {"length"}
    tokens, own = free[0][0], served.service.base.stop_tokens
    chosen = tokens[2]
    ended = sampled(seed=1, stop=[chosen])[0]
    assert chosen not in own and ended == (tokens[: tokens.index(chosen) + 1], "stop")
    first = next((i for i, token in enumerate(tokens) if token in own), 39)  # ids are stops besides the model's own
    assert sampled(seed=1)[0][0] == sampled(seed=1, stop=[258])[0][0] == tokens[: first + 1]
    greedy = [sampled(temperature=0.0, seed=seed)[0] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_a_custom_loss_runs_in_the_client(served, trainer):
    data = examples("cross_entropy")
    other = served.client().create_lora_training_client("tests/tiny", rank=4, seed=1).result()

    def loss(data, log_probs):
        weights = [torch.tensor(d.loss_fn_inputs["weights"].data) for d in data]
        total = -sum((w * values).sum() for w, values in zip(weights, log_probs, strict=True))
        return total, {"of_mine": 3.0}

    result = trainer.forward_backward_custom(data, loss).result()
    assert result.metrics["of_mine"] == 3.0
    expected = other.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    norms = [model.optim_step(ADAM).result().metrics["grad_norm"] for model in (trainer, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_surrogate_of_the_core_returns_its_mask(trainer):
    data = examples("ppo", range(4))
    result = trainer.forward_backward(data, "ppo", {"surrogate": "cppo", "surrogate.delta": 0.02}).result()
    keep = np.array(result.loss_fn_outputs[0]["keep"].data)
    assert result.metrics["masked_fraction:mean"] > 0 and set(keep) <= {0.0, 1.0} and (keep[:3] == 0).all()
    with pytest.raises(tinker.RequestFailedError, match=r"no surrogate 'copo'; did you mean 'cppo'\?") as error:
        trainer.forward_backward(data, "ppo", {"surrogate": "copo"}).result()
    assert error.value.category == types.RequestErrorCategory.User


def test_a_state_is_saved_loaded_listed_and_deleted(served, trainer):
    trained(trainer)
    path = trainer.save_state("first").result().path
    assert path == f"tinker://{trainer.model_id}/weights/first"
    client = served.client()
    with_moments = client.create_training_client_from_state_with_optimizer(path).result()
    without = client.create_training_client_from_state(path).result()
    losses, anew = trained(trainer, 2), trained(without, 2)
    assert trained(with_moments, 2) == losses != anew
    assert trained(client.create_training_client_from_state(path).result(), 2) == anew
    rest = tinker.RestClient(base_url=served.url)
    assert [c.tinker_path for c in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [path]
    assert rest.get_training_run(trainer.model_id).result().last_checkpoint.tinker_path == path
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name, or set overwrite"):
        trainer.save_state("first").result()
    rest.delete_checkpoint(trainer.model_id, "weights/first").result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    with pytest.raises(tinker.UnprocessableEntityError, match="no weights"):
        client.create_training_client_from_state(path).result()


@pytest.fixture(scope="module", params=[4, 0])
def of_a_kind(served, request):
    """A client, and its model of two steps: of adapters, and of all weights."""
    client = served.client()
    model = new_model(client, request.param)
    trained(model, 2)
    return client, model


def test_a_state_is_sampled_as_its_sampler_and_a_folder_to_download_is_not(of_a_kind):
    client, model = of_a_kind
    path = model.save_state("sampled").result().path
    samplers = [model.save_weights_and_get_sampling_client(), client.create_sampling_client(model_path=path)]
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=5, seed=1)
    first, second = (sampler.result().sample(prompt, 1, params).result().sequences[0] for sampler in samplers)
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)
    path = model.save_weights_external("folder").result().path
    with pytest.raises(tinker.UnprocessableEntityError, match="training or sampler weights are needed"):
        client.create_sampling_client(model_path=path).result()


def test_weights_are_downloaded_in_the_format_of_hugging_face(of_a_kind, served, tiny_model, tmp_path):
    _, model = of_a_kind
    path = model.save_weights_external("out").result().path
    urls = tinker.RestClient(base_url=served.url).get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    assert path.endswith("/external_weights/out")
    if model.get_info().is_lora:
        from peft import PeftModel

        there = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model("llama")), tmp_path)
    else:
        there = AutoModelForCausalLM.from_pretrained(tmp_path)
    datum = example(3, weights=np.ones(12, np.float32), logprobs=None, advantages=None)
    (ours,) = log_probs(model.forward([datum], "cross_entropy").result())
    with torch.no_grad():
        logits = there(torch.tensor([datum.model_input.to_ints()])).logits[0]
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
    theirs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
