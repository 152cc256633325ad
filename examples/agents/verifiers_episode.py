"""An episode of any environment of verifiers (0.4), as a program: a row on stdin, the reward on stdout.

    task: {kind: seeds, count: 100, environment: {kind: agent, command: [VENV/bin/python,
        examples/agents/verifiers_episode.py, '{"taskset": {"id": "my-taskset"}}']}}

The argument is the environment's config, as in its `[env]`. The row's `number` selects the task. An episode that
verifiers doesn't report as ok counts as a failure, not as a reward of 0.
"""

import asyncio
import json
import os
import sys
from itertools import islice

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def play(config: dict, number: int) -> float:
    """Return the sum of the rewards of all traces."""
    environment = load_environment(resolve_env_config(config))
    task = next(islice(environment.taskset, number, None))
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    policy = ModelContext(client=client, model=os.environ["OPENAI_MODEL"], sampling=SamplingConfig())
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, policy)
    if not episode.ok:
        sys.exit(str([error.message for part in (episode, *episode.traces) for error in part.errors]))
    return sum(trace.reward for trace in episode.traces)


print(asyncio.run(play(json.loads(sys.argv[1]), json.load(sys.stdin)["number"])))
