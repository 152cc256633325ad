"""A client's program: turns of sampling, rewards and an update, through the SDK. A process of its own."""

import zlib

import numpy as np
import tinker
from tinker import types

from benchmarks.side import Channel, argument, clock


def turn(trainer, settings, number):
    """Sample, reward by a hash of the tokens, and update; returns what was sampled and measured, to compare bits."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=settings["max_tokens"], seed=number)
    draw = np.random.default_rng([settings["seed"], number])
    prompts = [
        draw.integers(40, settings["vocabulary"], settings["prompt"]).tolist() for _ in range(settings["prompts"])
    ]
    waiting = [sampler.sample(types.ModelInput.from_ints(p), settings["completions"], params) for p in prompts]
    data, seen = [], []
    for prompt, answer in zip(prompts, waiting, strict=True):
        sequences = answer.result().sequences
        rewards = [zlib.crc32(bytes(str(s.tokens), "ascii")) / 2**32 for s in sequences]
        seen += [(s.tokens, s.logprobs) for s in sequences]
        for sequence, reward in zip(sequences, rewards, strict=True):
            before, whole = len(prompt) - 1, [*prompt, *sequence.tokens]
            inputs = {
                "target_tokens": np.array(whole[1:]),
                "logprobs": np.array([0.0] * before + sequence.logprobs, np.float32),
                "advantages": np.array([0.0] * before + [reward - np.mean(rewards)] * len(sequence.tokens), np.float32),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs))
    passed = trainer.forward_backward(data, "importance_sampling")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    return seen, passed.result().metrics, stepped.result().metrics


def main():
    channel, settings = Channel(), argument()
    client = tinker.ServiceClient(base_url=settings["url"], api_key="tml-benchmark")
    trainer = client.create_lora_training_client("served", rank=16, seed=settings["seed"]).result()
    turn(trainer, settings, -1 % 2**31)  # loads the sampler's engine
    channel.send(ready=True)
    number = 0
    while channel.wait():
        start, seen = clock(), []
        for _ in range(settings["turns"]):
            seen.append(turn(trainer, settings, number))
            number += 1
        channel.send(seconds=clock() - start, bits=zlib.crc32(repr(seen).encode()))


if __name__ == "__main__":
    main()
