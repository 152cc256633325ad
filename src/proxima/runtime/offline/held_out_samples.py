"""Greedy completions of a few held-out prompts: an early look at what the model has learnt."""

from collections.abc import Sequence

from proxima.data import Group, Prompt, Score
from proxima.engine.local import Local, collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, WeightUpdate
from proxima.model import LoadedModel
from proxima.model.compute_thread import ComputeThread

UNSCORED = Score(value=float("nan"), valid=False)  # nobody judges them


class HeldOutSamples:
    """Prompts, and the engine in this process that completes them.

    Args:
        prompts: not empty.
        loaded: the model that is trained; the engine has a copy of its weights.
        max_tokens: of a completion.
        max_length: tokens of prompt and completion together.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        loaded: LoadedModel,
        compute: ComputeThread,
        *,
        max_tokens: int,
        max_length: int,
    ) -> None:
        self.prompts, self.loaded = prompts, loaded
        self.sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        self.engine = Local(slots=len(prompts)).build(EngineSetup.of(loaded, max_length=max_length, compute=compute))

    async def groups(self, version: int) -> list[Group]:
        """A group of one completion without a score for each prompt, under the present weights."""
        await self.engine.publish(WeightUpdate(version=version, module=self.loaded.model))
        completions = await collect(
            self.engine, [Request(prompt=p, sample=0, sampling=self.sampling) for p in self.prompts]
        )
        pairs = zip(self.prompts, completions, strict=True)
        return [Group(prompt=prompt, completions=(one,), scores=(UNSCORED,)) for prompt, one in pairs]
