"""The critic of SkyRL's `gae`, a model of its own."""

import math

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

PREFIX = "trainer.critic.optimizer_config."
SIZE = "trainer.critic_mini_batch_size"
CLIP = "trainer.algorithm.value_clip"
MODEL = "trainer.critic.model.path"


def critic_of_values(d: Draft, o: Options) -> None:
    """`critic` where the advantage is `gae`; else its options have no effect."""
    if d.entries["algorithm.advantage.kind"].value != "gae":
        why = "no advantage here reads its values: a critic would only cost time"
        d.drops_given(o, why, *(name for name in o.flat if name.startswith("trainer.critic.")), SIZE, CLIP)
        return
    d.spec("critic", "model", o.origin("trainer.algorithm.advantage_estimator"), "the critic of gae")
    if o.get(MODEL) is None:
        d.ask("critic.path", None, f"the critic's model, {MODEL}; null is a copy of the policy with a new head")
    else:
        d.put("critic.path", str(o.get(MODEL)), o.origin(MODEL))
    d.put("critic.bootstrap", False, "SkyRL gives a completion no value after its end")
    d.put("critic.loss.epsilon", *o.sourced(CLIP, default=0.2))
    prompts = d.entries["train.prompts_per_step"].value
    mini = o.whole(SIZE, default=256, least=1)
    common.updates(d, math.ceil(prompts / mini), o.origin(SIZE), path="critic")
    names = {"lr": (PREFIX + "lr",), "weight_decay": (PREFIX + "weight_decay",)}
    common.optimizer(d, o, names, {"lr": 5e-6, "weight_decay": 0.01}, "critic")
    common.betas(d, o, PREFIX + "adam_betas", "critic", [0.9, 0.999])
    common.schedule(d, o, PREFIX + "scheduler", default="constant_with_warmup", path="critic")
    d.copy("critic.max_grad_norm", o, PREFIX + "max_grad_norm", default=1.0)
    warmup = PREFIX + "num_warmup_steps"
    d.put("critic.warmup_steps", max(0, o.whole(warmup, default=0)), o.origin(warmup))
    rank = "trainer.critic.model.lora.rank"
    own = o.whole(rank, default=0)
    if own != o.whole("trainer.policy.model.lora.rank", default=0):
        d.lacks(rank, f"{own}: here policy and critic have the same model.lora, or none")
