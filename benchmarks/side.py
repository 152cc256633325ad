"""What runs inside a side's process. Standard library only: a peer's environment has no proxima.

The harness and a side exchange one JSON object a line: a request on stdin, its answer on what was stdout.
Whatever the side prints goes to its log.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Channel:
    """Takes stdout for itself, so that no progress bar of a library ends up among the answers."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def wait(self) -> bool:
        """Sleep until the next request; False when the harness is done."""
        return bool(sys.stdin.readline())


def serve(once: Callable[[], dict[str, Any]], channel: Channel, **ready: Any) -> None:
    """Say `ready`, then answer each request with what `once` measured."""
    channel.send(**ready)
    while channel.wait():
        channel.send(**once())


def device() -> str:
    """Where both sides compute: the GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def bf16_policy(settings: dict[str, Any], **options: Any) -> tuple[Any, Callable[[int], list[int]]]:
    """Ours alone: the policy of the settings in bf16, and what draws so many token ids that it has, the same each time;
    `options` are the policy's."""
    import numpy as np
    import torch

    from proxima.model import Policy, load

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    most = min(40_000, loaded.model.config.vocab_size)
    draw = np.random.default_rng(1)
    policy = Policy(loaded, compute_dtype=torch.bfloat16, **options)
    return policy, lambda count: draw.integers(min(1000, most // 2), most, count).tolist()


def timed_backward(policy: Any, batch: Any, trained: Any) -> dict[str, float]:
    """Ours alone: seconds of one forward and backward of the mean log-prob of the tokens `trained`, loss and gradient
    norm."""
    import torch

    policy.model.zero_grad()
    start = clock()
    loss = -policy(batch).log_prob[trained].mean()
    loss.backward()
    seconds = clock() - start
    norm = torch.stack([p.grad.double().square().sum() for p in policy.model.parameters()]).sum().sqrt()
    return {"seconds": seconds, "loss": loss.item(), "grad_norm": norm.item()}


def clock() -> float:
    """Seconds, once the GPU has done what it was asked for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def argument() -> dict[str, Any]:
    """The settings that the harness gave on the command line."""
    return json.loads(sys.argv[1])
