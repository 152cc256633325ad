"""Examples as clients send them."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.torch import load_file
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient, fetch_training_info

from proxima_tinker.datum import Datum
from proxima_tinker.losses import ClientLoss
from proxima_tinker.trained_model import PassResult, TrainedModel
from proxima_tinker.workers import advanced


def run_whole(model: TrainedModel, data: list[Datum], loss: ClientLoss, *, backward: bool) -> PassResult:
    """`TrainedModel.run`, with nobody else to take a turn."""
    parts = model.run(data, loss, backward=backward)
    while not (result := advanced(parts)):
        pass
    return result[0]


def example(seed: int, length: int = 12, prompt: int = 4, vocabulary: int = 90, **columns: Any) -> Any:
    """Random tokens, of which all after the prompt are in the loss, with weights, log-probs and advantages."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(5, vocabulary, length + 1)
    of_answer = (np.arange(length) >= prompt - 1).astype(np.float32)
    inputs = {
        "target_tokens": tokens[1:],
        "weights": of_answer,
        "logprobs": of_answer * draw.uniform(-5, -3, length).astype(np.float32),
        "advantages": of_answer * np.float32(draw.normal()),
    } | columns
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: values for name, values in inputs.items() if values is not None},
    )


OF_LOSS = {
    "cross_entropy": ("target_tokens", "weights"),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("target_tokens", "logprobs", "advantages")),
}


def examples(loss: str, seeds: Any = range(6), **settings: Any) -> list[Any]:
    """Examples with the inputs of a loss."""
    data = [example(seed, length=8 + seed % 5, **settings) for seed in seeds]
    names = OF_LOSS[loss]
    return [
        types.Datum(model_input=d.model_input, loss_fn_inputs={n: d.loss_fn_inputs[n] for n in names}) for d in data
    ]


def new_model(client: Any, rank: int, **settings: Any) -> Any:
    """A client's model with adapters of this rank; 0: all weights are trained, which the SDK asks for only through its
    requests."""
    if rank:
        return client.create_lora_training_client("tests/tiny", rank=rank, **settings).result()
    holder = client.holder
    number = holder.get_training_client_id()
    body = {"session_id": holder.get_session_id(), "model_seq_id": number, "base_model": "tests/tiny"}
    url = f"{holder._base_url}/api/v1"
    request = httpx.post(f"{url}/create_model", json=body).raise_for_status().json()["request_id"]
    made = httpx.post(f"{url}/retrieve_future", json={"request_id": request}, timeout=600).json()
    info = holder.run_coroutine_threadsafe(fetch_training_info(holder, made["model_id"])).result()
    assert info.is_lora is False
    return TrainingClient(holder, model_seq_id=number, model_id=made["model_id"], info=info)


def program(client: Any, seed: int, rank: int = 4, steps: int = 3) -> tuple[list[Any], str]:
    """What a program that trains and sometimes samples sees: log-probs, losses, tokens; and where it saves its
    state."""
    model, seen = new_model(client, rank, seed=seed), list[Any]()
    for step in range(steps):
        parts = [examples("cross_entropy", range(seed + step + i, seed + step + i + 3)) for i in range(2)]
        passes = [model.forward_backward(part, "cross_entropy") for part in parts]
        seen.append(model.optim_step(types.AdamParams(learning_rate=0.02)).result().metrics["grad_norm"])
        for passed in passes:
            seen.append(passed.result().metrics["loss:sum"])
            seen.append([out["logprobs"].data for out in passed.result().loss_fn_outputs])
        if step % 5 == 1:
            sampler = model.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=6, seed=step)
            answer = sampler.sample(types.ModelInput.from_ints([7, 8, 9]), 2, params).result()
            seen.append([(sequence.tokens, sequence.logprobs) for sequence in answer.sequences])
    return seen, model.save_state("end").result().path


def weights(folder: Path, path: str) -> dict[str, Any]:
    """The state in a checkpoint of a server's folder."""
    run, segment, name = path.removeprefix("tinker://").split("/")
    return load_file(folder / "models" / run.replace(":", "-") / segment / name / "optimizer.safetensors")


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)
