"""Code that runs inside a side's process. Standard library only: a peer's environment has no proxima.

The harness and a side exchange one JSON object per line: a request on stdin, its answer on the original stdout.
Everything that the side prints goes to its log.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Channel:
    """Reserves stdout for the answers, so that a library's progress bar can't get between them."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def send(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def wait(self) -> bool:
        """Wait for the next request; return False when the harness is done."""
        return bool(sys.stdin.readline())


def serve(once: Callable[[], dict[str, Any]], channel: Channel, **ready: Any) -> None:
    """Send `ready`, then answer each request with what `once` measured."""
    channel.send(**ready)
    while channel.wait():
        channel.send(**once())


def device() -> str:
    """Return the device on which both sides compute: the GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def bf16_policy(settings: dict[str, Any], **options: Any) -> tuple[Any, Callable[[int], list[int]]]:
    """Return the policy of the settings in bf16, and a function that draws a number of its token ids, the same in each
    process; `options` are the policy's. Not for peers."""
    import numpy as np
    import torch

    from proxima.model.load import load
    from proxima.model.policy import Policy

    torch.set_num_threads(settings["threads"])
    loaded = load(settings["model"], device=device())
    most = min(40_000, loaded.model.config.vocab_size)
    draw = np.random.default_rng(1)
    policy = Policy(loaded, compute_dtype=torch.bfloat16, **options)
    return policy, lambda count: draw.integers(min(1000, most // 2), most, count).tolist()


def timed_backward(policy: Any, batch: Any, trained: Any) -> dict[str, float]:
    """Return the seconds of one forward and backward of the mean log-prob of the tokens `trained`, the loss and the
    gradient norm. Not for peers."""
    import torch

    policy.model.zero_grad()
    start = clock()
    loss = -policy(batch).log_prob[trained].mean()
    loss.backward()
    seconds = clock() - start
    norm = torch.stack([p.grad.double().square().sum() for p in policy.model.parameters()]).sum().sqrt()
    return {"seconds": seconds, "loss": loss.item(), "grad_norm": norm.item()}


def clock() -> float:
    """Return the time in seconds, once the GPU has finished its work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def argument() -> dict[str, Any]:
    """Return the settings that the harness passed on the command line."""
    return json.loads(sys.argv[1])
