"""The cases: the recipe, its overrides, and the allowed deviation of several ranks from one process."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SGD = "{kind: 'benchmarks.ranks.specs:Sgd', lr: 0.05}"
EVEN = "reward=[{kind: 'benchmarks.ranks.specs:Even'}]"
CONSTANT = "reward=[{kind: 'benchmarks.ranks.specs:Even', constant: true}]"
COMMON = ("model.device=cpu", "seed=1", "runtime.threads=1", "model.max_length=200", "train.steps=5")
FLOAT32 = ("model.compute_dtype=float32",)
RL = ("eval.limit=4", "sampling.max_tokens=6", "engine.slots=8", "engine.dtype=float32")
RL += ("train.prompts_per_step=4", "train.completions_per_prompt=4", "train.warmup_steps=2")
OFFLINE = ("train.examples_per_step=4", "eval.limit=4")
FIXED_DATA = ("cpu/sft", "cpu/dpo", "cpu/reward")  # recipes without rewards
REFILL = "algorithm.selection=[{kind: drop_uniform_groups}, {kind: prune, rate: 0.5, allocate: true}]"
SMALLER = ("train.updates_per_step=2", "train.steps=3", "train.optimizer.lr=0.02")  # unbounded ratios amplify rounding
ASYNC = ("runtime.max_lag=2", "runtime.max_concurrent_rollouts=8", "engine.interrupt=finish")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on one process and on several.

    Args:
        row: row of the table that it belongs to.
        model: kind of tiny model, or `smollm2`.
        placed: overrides for the runs on several ranks only.
        sizes: numbers of ranks.
        bound: limit on the deviation of every metric.
        torchrun: start the ranks by torchrun itself instead of forking them with its environment.
        replay: train on the rollouts stored by a run with the same overrides and those of `source`.
        exact: True: the trajectories are the same; False: they depend on timing, and the runs only have to finish.
    """

    name: str
    row: str = "training"
    recipe: str = "quickstart"
    model: str = "llama"
    overrides: Sequence[str] = ()
    placed: Sequence[str] = ()
    sizes: Sequence[int] = (2, 4)
    bound: float = 1e-5
    torchrun: bool = False
    replay: bool = False
    source: Sequence[str] = ()
    exact: bool = True
    sgd: bool = False
    bfloat16: bool = False

    def words(self, models: Path, folder: Path, rollouts: Path | None = None, more: Sequence[str] = ()) -> list[str]:
        """Return the command line without placement; `more` are further overrides."""
        overrides = [f"model.path={models / self.model}", *COMMON, *(() if self.bfloat16 else FLOAT32)]
        overrides += [*OFFLINE] if self.recipe in FIXED_DATA else [EVEN, *RL]
        overrides += [f"train.optimizer={SGD}"] if self.sgd else []
        own = [text.replace("MODELS", str(models)).replace("FOLDER", str(folder)) for text in [*self.overrides, *more]]
        overrides += own
        last = {text.partition("=")[0]: text for text in overrides}
        words = ["train", f"recipes/{self.recipe}.yaml", f"folder={folder}"]
        return [*words, *last.values(), *([] if rollouts is None else ["--rollouts", str(rollouts)])]


def write_uneven(models: Path) -> None:
    """Write rows whose questions, answers and pairs have from one to over a hundred tokens."""
    lengths = (1, 110, 3, 2, 90, 1, 1, 60, 2, 120, 5, 1, 1, 2, 100, 3, 70, 1, 4, 2)
    rows = [
        {
            "question": "a" * length,
            "answer": "b" * lengths[-i - 1],
            "prompt": "q" * (length % 40 + 1),
            "chosen": "c" * lengths[-i - 1],
            "rejected": "r" * (length % 7 + 1),
            "completion": "k" * lengths[-i - 1],
            "label": i % 3 > 0,
        }
        for i, length in enumerate(lengths)
    ]
    (models / "uneven.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


UNEVEN = ("task={kind: jsonl, path: MODELS/uneven.jsonl}", "eval.task=null", "eval.every=0", "eval.limit=0")
KINDS = (  # name, recipe, overrides
    ("GRPO with a trust region", "quickstart", ()),
    ("LoRA", "cpu/lora", ()),
    ("critic", "cpu/ppo_critic", ()),
    ("DPO", "cpu/dpo", ()),
    ("SFT", "cpu/sft", ()),
    ("reward model", "cpu/reward", ()),
)


def training() -> Iterator[Case]:
    """Yield the first row of the table: kinds of training."""
    for name, recipe, overrides in KINDS:
        for sgd in (True, False):
            yield Case(
                name=f"{name}, tiny Qwen3, {'SGD' if sgd else 'AdamW'}",
                recipe=recipe,
                overrides=overrides,
                model="qwen3",
                sgd=sgd,
                torchrun=not sgd and recipe == "quickstart",
            )
    small = ("train.steps=5", "train.prompts_per_step=2", "train.completions_per_prompt=3", "eval.limit=0")
    small += ("train.updates_per_step=1", "eval.task=null", "eval.every=0", "checkpoint.every=5")
    exact = SGD.replace("lr: 0.05", "lr: 0.0001, squares: FOLDER-squares")
    for optimizer, bound, overrides in (
        ("SGD", 5e-5, (f"train.optimizer={exact}", "train.max_grad_norm=0")),  # the logged norm is float32
        ("AdamW", 2e-4, ("train.tokens_per_micro_batch=200",)),  # rare tokens' log-probs deviate too, after its steps
    ):
        yield Case(
            name=f"GRPO with a trust region, SmolLM2-135M, {optimizer}",
            model="smollm2",
            sgd=optimizer == "SGD",
            replay=True,
            torchrun=True,
            bound=bound,
            overrides=(*small, *overrides),
        )


def batches() -> Iterator[Case]:
    """Yield the second row: computations over a whole update, and how it is split."""
    row = "whole updates"
    yield Case(
        row=row,
        name="pruning, allocation, dynamic sampling",
        recipe="cpu/cppo_prune",
        overrides=(REFILL, "algorithm.dynamic_sampling.max_num_gen_batches=4"),
    )
    yield Case(row=row, name="DAPO's dynamic sampling", recipe="cpu/dapo")
    yield Case(row=row, name="CPPO pruning, reference KL", recipe="cpu/cppo_prune")
    for surrogate in ("clip_cov", "m2po", "sapo", "dro", "gspo", "vespo"):
        yield Case(
            row=row,
            name=f"surrogate {surrogate}",
            overrides=(f"algorithm={{surrogate: {{kind: {surrogate}}}}}", *SMALLER),
            sgd=True,
            replay=True,
        )
    yield Case(  # of another policy: |l| has a kink at 0, where rounding decides the sign of l
        row=row,
        name="surrogate kl_cov, replay of another policy",
        overrides=("algorithm={surrogate: {kind: kl_cov, share: 0.3}, mismatch: {on_mismatch: warn}}",),
        sgd=True,
        replay=True,
        source=("model.path=MODELS/teacher",),
    )
    yield Case(
        row=row,
        name="correction second_moment",
        overrides=("algorithm={preset: decoupled, correction: [{kind: second_moment}]}", "train.updates_per_step=2"),
    )
    yield Case(
        row=row,
        name="early stop by target_kl",
        overrides=(
            "algorithm={surrogate: {kind: ppo_clip}}",
            "train.epochs_per_step=4",
            "train.target_kl=0.00002",
            "train.updates_per_step=2",
        ),
    )
    yield Case(row=row, name="value head", recipe="cpu/ppo_critic", overrides=("critic={kind: head}",))
    yield Case(row=row, name="reference KL", overrides=("algorithm.reference_kl={kind: k3, coefficient: 0.1}",))
    yield Case(row=row, name="KL in the reward", overrides=("algorithm.reward_kl={coefficient: 0.1}",))
    teacher = ("algorithm={preset: distill, distillation: {path: MODELS/teacher}}",)
    yield Case(row=row, name="distillation, top_k 16", overrides=teacher)
    yield Case(
        row=row,
        name="distillation, top_k 0",
        overrides=(teacher[0].replace("teacher}", "teacher, divergence: {kind: reverse_kl, top_k: 0}}"),),
    )
    yield Case(row=row, name="uneven prompts", overrides=(*UNEVEN,), sgd=True)
    for recipe in FIXED_DATA:
        rest = ("eval.task=null", "eval.every=0", "eval.limit=0", "train.tokens_per_micro_batch=200")
        yield Case(
            row=row,
            name=f"uneven rows, {recipe.removeprefix('cpu/')}, micro-batches of 200",
            recipe=recipe,
            overrides=(UNEVEN[0], *rest),
            sgd=True,
        )
    yield Case(
        row=row,
        name="ranks without a token: one group",
        overrides=("train.prompts_per_step=1", "train.updates_per_step=1"),
        sgd=True,
    )
    yield Case(
        row=row,
        name="ranks without a token: one pair",
        recipe="cpu/dpo",
        overrides=("train.examples_per_step=1",),
        sgd=True,
    )


def layouts() -> Iterator[Case]:
    """Yield the third row: how the model is placed and computes."""
    row = "layouts"
    for name, sharding in (
        ("replicate", "replicate"),
        ("hybrid", "hybrid"),
        ("full, kept gathered", "{kind: full, reshard_after_forward: false}"),
        ("full, offload", "{kind: full, offload: true}"),
        ("hybrid, offload", "{kind: hybrid, offload: true}"),
    ):
        yield Case(
            row=row,
            sizes=(4,) if "hybrid" in name else (2,),
            name=f"sharding {name}",
            model="qwen3",
            sgd=True,
            placed=(f"placement.sharding={sharding}",),
        )
    yield Case(
        row=row,
        sizes=(2,),
        name="sharding replicate, critic",
        recipe="cpu/ppo_critic",
        placed=("placement.sharding=replicate",),
    )
    yield Case(row=row, sizes=(2,), name="output layer of its own (Qwen2)", model="qwen2", sgd=True)
    yield Case(
        row=row,
        sizes=(2,),
        name="gradient checkpointing",
        overrides=("model.gradient_checkpointing=true",),
        sgd=True,
        bound=2e-5,  # of the logged norm, a float32 sum: 4.8e-6 on one machine, 1.3e-5 on another
    )
    yield Case(row=row, sizes=(2,), name="no shared prompt", overrides=("model.share_prompt=false",), sgd=True)
    yield Case(row=row, sizes=(2,), name="bfloat16 products", bfloat16=True, bound=5e-2, replay=True)
    yield Case(
        row=row,
        sizes=(2,),
        name="bfloat16 products, gathered in bfloat16",
        bfloat16=True,
        bound=0.2,  # embedding, norms and residuals are in bfloat16 too
        replay=True,
        placed=("placement.sharding={kind: full, param_dtype: bfloat16}",),
    )
    yield Case(
        row=row,
        sizes=(2,),
        name="bfloat16 weights",
        bfloat16=True,
        bound=5e-2,
        replay=True,
        overrides=("model.dtype=bfloat16",),
    )


def odd() -> Iterator[Case]:
    """Yield the fourth row: unusual runs."""
    row = "odd runs"
    yield Case(row=row, sizes=(2,), name="all advantages 0", overrides=(CONSTANT,))
    yield Case(
        row=row,
        sizes=(2,),
        name="groups over the micro-batch budget",
        overrides=("train.tokens_per_micro_batch=16",),
        sgd=True,
    )
    yield Case(
        row=row,
        sizes=(2,),
        name="two updates, three epochs",
        overrides=(
            "train.updates_per_step=2",
            "train.epochs_per_step=3",
            "train.steps=1",
            "algorithm={surrogate: {kind: ppo_clip}}",
        ),
        sgd=True,
    )
    yield Case(
        row=row,
        sizes=(2,),
        name="KTO",
        recipe="cpu/dpo",
        overrides=("preference.loss=[{kind: kto}]", "train.optimizer.lr=0.02", *UNEVEN),
        sgd=True,
    )
    yield Case(
        row=row, sizes=(2,), name="DPO, reference not cached", recipe="cpu/dpo", overrides=("preference.cache=null",)
    )
    yield Case(
        row=row,
        sizes=(2,),
        name="two preference losses",
        recipe="cpu/dpo",
        overrides=("preference.loss=[{kind: sigmoid, beta: 0.1}, {kind: sft}]",),
    )
    yield Case(row=row, sizes=(2,), name="online DPO", recipe="cpu/online_dpo", overrides=("train.updates_per_step=1",))
    yield Case(row=row, sizes=(2,), name="replay", replay=True)
    yield Case(
        row=row,
        sizes=(2,),
        name="asynchronous, proximal: next",
        recipe="cpu/sdp",
        overrides=("engine.kind=local", *ASYNC),
        exact=False,
    )
    yield Case(row=row, sizes=(2,), name="asynchronous, engine in its process", recipe="cpu/sdp", exact=False)
    yield Case(
        row=row,
        sizes=(2,),
        name="keep_best, evaluation every step",
        overrides=("eval.every=1", "checkpoint.every=1", "checkpoint.keep_best=true", "eval.metric=reward"),
    )
    plateau = "eval.stop_after={patience: 1, min_delta: 0.9}"
    yield Case(row=row, sizes=(2,), name="eval.stop_after", overrides=("eval.every=1", "eval.metric=reward", plateau))
    suite = "{kind: arithmetic, low: 1, high: 9, held_out: 0.25, split: test, size: 8}"
    yield Case(
        row=row,
        sizes=(2,),
        name="two evaluation suites",
        overrides=(f"eval.sets=[{{name: small, task: {suite}}}]", "eval.every=2"),
    )
    yield Case(row=row, sizes=(2,), name="max_grad_norm 0", overrides=("train.max_grad_norm=0",), sgd=True)
    yield Case(row=row, sizes=(2,), name="clipped gradients", overrides=("train.max_grad_norm=0.05",), sgd=True)


def all_cases() -> list[Case]:
    return [*training(), *batches(), *layouts(), *odd()]
