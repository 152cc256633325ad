"""Examples as clients send them."""

from typing import Any

import numpy as np
from tinker import types

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
