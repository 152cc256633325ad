"""Runs that tests read and interrupt: their settings, and what is left of each where nothing interrupts it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from proxima.model.load import save
from proxima.model.scalar_model import load_scalar_model
from proxima.runtime.state.summary import Summary
from tests.runtime import tiny_run
from tests.runtime.episode_world import episode_recipe, whole
from tests.runtime.offline import tiny_dpo, tiny_reward, tiny_sft
from tests.runtime.tiny_run import NO_EVAL, Watcher, traces
from tests.tiny_images import make_tiny_reader

ADAMW = {"kind": "adamw", "lr": 3e-2}
EPOCHS = {"train__steps": 4, "train__updates_per_step": 2, "train__epochs_per_step": 2}
LORA = {"rank": 4, "alpha": 8.0}
ADAPTER = {
    "model__lora": LORA,
    "algorithm": {"preset": "grpo", "reference_kl": {"kind": "k3", "coefficient": 0.1}},
    "train__updates_per_step": 2,
    "train__optimizer": ADAMW | {"weight_decay": 0.01},
}
CARRIED = {
    "algorithm__selection": [{"kind": "drop_uniform_groups"}, {"kind": "prune", "rate": 0.5}],
    "algorithm__dynamic_sampling": {"oversample": 2.0, "exhausted": "partial"},
    # a third of the prompts teach nothing, and some completions have no score
    "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3, "fail_on": 5}],
    "task__size": 40,
}
POOLED = CARRIED | {  # a third of the questions teach nothing, epoch after epoch
    "algorithm__question_pool": {"least": 0.25},
    "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],
    "data__shuffle": False,
    "task__size": 9,
    "train__steps": 9,
    **NO_EVAL,
}
PPO = {"preset": "ppo", "advantage": {"kind": "gae", "lam": 0.9}}
CRITIC = {"kind": "model", "head_std": 0.02, "epochs_per_step": 2, "loss": {"epsilon": 0.05}}
HEAD = {"kind": "head", "head_std": 0.02, "coefficient": 0.5}
SUMS = {"kind": "arithmetic", "low": 1, "high": 9, "held_out": 0.3, "split": "test"}
SETS = [
    {"name": "few", "task": SUMS | {"size": 3}},
    {"name": "many", "task": SUMS | {"size": 6}, "limit": 4, "samples": 2, "reward": ["number"]},
]
CUT = {"sampling__top_p": 0.8, "sampling__top_k": 64, "engine__sampling_mask": True}
PLATEAU = {
    "train__steps": 5,
    "train__schedule": "constant",
    "eval__every": 1,
    "eval__stop_after": {"patience": 2, "min_delta": 1e3},  # no evaluation is an improvement
}
MIX = {  # two sources, and a reward that sees which one; two epochs in three steps
    "task": {
        "kind": "mix",
        "tasks": [
            {"name": name, "weight": weight, "task": {"kind": "arithmetic", "operators": [operator], "size": 6}}
            for name, weight, operator in (("add", 2, "+"), ("times", 1, "*"))
        ],
        "size": 6,
    },
    "reward": [{"kind": "tests.runtime.tiny_run:BySource"}],
    "train__completions_per_prompt": 2,
    **NO_EVAL,
}
FEW = {"train__steps": 2, "train__prompts_per_step": 2, **NO_EVAL}
AGENT = {"kind": "agent", "run": "tests.runtime.echo_agent:play"}
PAID = {
    "task__environment": {"kind": "agent", "run": "tests.runtime.echo_agent:play_paid"},
    "eval__task__environment": None,
    "algorithm__advantage": {"kind": "turn_returns", "gamma": 0.5},
    "train__completions_per_prompt": 3,
}
ECHO = {"algorithm__echo": {"roles": {"user": 0.5}}, "algorithm__advantage": {"kind": "rloo"}}
ROLES = {  # groups are carried over, with the scores of their players
    "task__environment": {"kind": "agent", "run": "tests.runtime.echo_agent:play_roles", "roles": ["picker", "sayer"]},
    "algorithm__advantage": {"kind": "rloo"},
    "algorithm__selection": [{"kind": "drop_uniform_groups"}],
    "algorithm__dynamic_sampling": {"oversample": 2.0, "exhausted": "partial"},
    "train__steps": 3,
}


def critic_settings(critic: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    settings = {"algorithm": PPO | algorithm, "critic": critic, "train__steps": 4, "train__updates_per_step": 2}
    return settings | NO_EVAL


def shaped(**reward_kl: Any) -> dict[str, Any]:
    paid = {"coefficient": 0.5, "estimator": "k1"} | reward_kl
    return {"algorithm": {"preset": "grpo", "reward_kl": paid}, "train__optimizer": ADAMW, **NO_EVAL}


def distilled(runs: "Runs") -> dict[str, Any]:
    divergence = {"kind": "js", "top_k_of": "student", "top_k": 4}
    teacher = {"path": str(runs.tiny_model("qwen2", 5)), "divergence": divergence}
    algorithm = {"preset": "distill", "distillation": teacher}
    return {"algorithm": algorithm, "engine__top_k_log_probs": 4, "train__updates_per_step": 2, **NO_EVAL}


def shown(runs: "Runs") -> dict[str, Any]:
    folder = runs.folder / "reader"
    if not folder.exists():
        make_tiny_reader("qwen3_vl", folder)
    task = {"kind": "shapes", "size": 20}
    return {"model__path": str(folder), "task": task, "train__updates_per_step": 2, **NO_EVAL}


def scored_by_a_model(runs: "Runs") -> dict[str, Any]:
    reward = {"kind": "model", "path": runs.scorer(), "compute_dtype": "float32", "device": "cpu"}
    return {"reward": [reward, {"kind": "tests.runtime.tiny_run:Even", "weight": 0}]}


def replayed(runs: "Runs") -> dict[str, Any]:
    return EPOCHS | {"algorithm": {"preset": "dppo"}, "rollouts": str(runs.finished("policy"))}


def replayed_episodes(runs: "Runs") -> dict[str, Any]:
    recorded = runs.folder / "recorded"
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2}
    if not recorded.exists():
        tiny_run.go(recorded, episode_recipe(runs.tiny_model("llama"), **FEW, **overlap))
    return FEW | {"algorithm": {"preset": "dppo"}, "rollouts": str(recorded)}


@dataclass(frozen=True)
class Run:
    """The settings, or a function that makes them, as changes of a recipe, and how it is compared.

    Args:
        rows: the recipe writes files of rows, to a folder that it is given.
    """

    settings: dict[str, Any] | Callable[["Runs"], dict[str, Any]] = field(default_factory=dict)
    recipe: Callable[..., dict[str, Any]] = tiny_run.recipe
    rows: bool = False
    traces: Callable[[Path], dict[str, Any]] = traces
    model: str = "llama"


episodes = partial(Run, recipe=episode_recipe, traces=whole)


sft, dpo, reward_model = (partial(Run, recipe=m.recipe, rows=True) for m in (tiny_sft, tiny_dpo, tiny_reward))
RUNS = {
    "plain": Run(),
    "policy": Run(EPOCHS),
    "critic": Run(critic_settings(CRITIC | {"value_warmup_steps": 1})),
    "value head": Run(critic_settings(HEAD)),
    "carried groups": Run(CARRIED),
    "pooled questions": Run(POOLED),
    "images": Run(shown),
    "adapter": Run(ADAPTER),
    "adapter and critic": Run(ADAPTER | critic_settings(CRITIC)),
    "adapter and value head": Run(ADAPTER | critic_settings(HEAD)),
    "sampling masks": Run(CUT | {"algorithm__preset": "grpo", "algorithm__behavior": "sampled"}),
    "routed experts": Run(
        {
            "train__steps": 2,
            "engine__routed_experts": True,
            "algorithm__routing_replay": "rollout",
            "model__compute_dtype": "bfloat16",
            "model__gradient_checkpointing": True,
            **NO_EVAL,
        },
        model="qwen3_moe",
    ),
    "likeliest tokens and greedy baselines": Run(
        {
            "algorithm": {"preset": "dppo", "advantage": "remax"},
            "algorithm__surrogate": {"kind": "dppo", "divergence": "topk_tv"},
            "engine__top_k_log_probs": 3,
        }
    ),
    "an engine that rounds": Run(
        {"engine__weights": "int4", "engine__noise": 0.3, "algorithm__mismatch": {"on_mismatch": "warn"}}
    ),
    "teacher": Run(distilled),
    "held bounds": Run(
        EPOCHS
        | {
            "algorithm": {"preset": "cppo", "hold": {"masked": 0.05, "rate": 0.5}},
            "algorithm__surrogate": {"kind": "cppo", "delta": 0.004, "delta_b": 0.0005},
        }
    ),
    "stopped completions": Run(
        {
            "algorithm": {"preset": "cppo_prune", "advantage": {"kind": "grpo"}},
            "algorithm__selection": [
                {"kind": "prune", "rate": 0.75, "stop": True, "reward_range": [0, 1], "stop_chance": 0.3}
            ],
            "reward": [{"kind": "tests.runtime.tiny_run:Right"}],
            "sampling": {"max_tokens": 32, "stop": ["1", "2"]},
            "train__completions_per_prompt": 8,
            **NO_EVAL,
        }
    ),
    "adaptive KL": Run(shaped(estimator="k3", adaptive={"target": 1e-3, "horizon": 32.0})),
    "epochs that stop": Run(
        {
            "algorithm": {"preset": "grpo"},
            "train__epochs_per_step": 3,
            "train__updates_per_step": 2,
            "train__optimizer": {"kind": "adamw", "lr": 1e-2},
            "train__target_kl": 1e-4,
            **NO_EVAL,
        }
    ),
    "online pairs": Run(
        {
            "algorithm": {"preset": "online_dpo"},
            "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],  # every third prompt is a tie
            **NO_EVAL,
        }
    ),
    "held-out sets": Run({"eval__sets": SETS, "eval__metric": "few/accuracy"}),
    "mix of tasks": Run(MIX),
    "scored by a model": Run(scored_by_a_model),
    "replay": Run(replayed),
    "replay of asynchronous episodes": Run(replayed_episodes, recipe=episode_recipe, traces=whole),
    "plateau": Run(PLATEAU | {"train__completions_per_prompt": 2}),
    "plateau of sft": sft(PLATEAU | {"eval__samples": 0}),
    "sft": sft(),
    "sft of an adapter": sft({"model__lora": LORA, "train__optimizer": ADAMW}),
    "reward model": reward_model(),
    "reward model of an adapter": reward_model(
        {"model__lora": LORA, "train__optimizer": {"kind": "adamw", "lr": 0.02}}
    ),
    "dpo": dpo(),
    "dpo without a cache": dpo({"preference__cache": None}),
    "dpo of an adapter": dpo({"model__lora": {"rank": 2, "alpha": 4}, "preference__cache": None}),
    "kto": dpo({"preference__loss": [{"kind": "kto", "beta": 0.5, "anchor": "kl"}]}),
    "kto without an anchor": dpo({"preference__loss": [{"kind": "kto", "beta": 0.5, "anchor": "zero"}]}),
    "episodes": episodes({"train__steps": 2}),
    "episodes of roles": episodes(FEW | ROLES),
    "episodes with echo": episodes(FEW | ECHO),
    "episodes of an agent that pays turns": episodes(FEW | PAID),
    "episodes of an agent": episodes(FEW | {"task__environment": AGENT, "train__completions_per_prompt": 2}),
}


@dataclass(frozen=True)
class Finished:
    """A run that nothing interrupted; read-only by agreement."""

    folder: Path
    summary: Summary
    watcher: Watcher
    traces: dict[str, Any]


class Runs:
    """The runs of a test process, below a folder."""

    def __init__(self, tiny_model: Callable[..., Path], folder: Path) -> None:
        self.tiny_model, self.folder = tiny_model, folder
        self._made: dict[str, Finished] = {}

    def tree(self, name: str, **changes: Any) -> dict[str, Any]:
        """The recipe of a run, with further changes."""
        run = RUNS[name]
        settings = run.settings(self) if callable(run.settings) else run.settings
        data = [self.folder / run.recipe.__module__] if run.rows else []
        return run.recipe(self.tiny_model(run.model), *data, **(settings | changes))

    def go(self, name: str, folder: Path, *, resume: bool = False, observer: Any = None, **changes: Any) -> Summary:
        return tiny_run.go(folder, self.tree(name, **changes), observer=observer, resume=resume)

    def made(self, name: str) -> Finished:
        if name not in self._made:
            folder, watcher = self.folder / name, Watcher()
            summary = self.go(name, folder, observer=watcher)
            assert summary.status == "done"
            self._made[name] = Finished(folder, summary, watcher, RUNS[name].traces(folder))
        return self._made[name]

    def finished(self, name: str) -> Path:
        return self.made(name).folder

    def traces(self, name: str) -> dict[str, Any]:
        """What no interruption may change."""
        return self.made(name).traces

    def scorer(self) -> str:
        """The folder of a model that is a reward."""
        folder = self.folder / "scorer"
        if not folder.exists():
            loaded = load_scalar_model(str(self.tiny_model("qwen2")), device="cpu", new_head=0.3, seed=2)
            save(loaded.model, loaded.tokenizer, folder)
        return str(folder)
