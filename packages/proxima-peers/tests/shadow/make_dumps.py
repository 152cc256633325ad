"""Makes dumps/: update steps of TRL, verl, AReaL and UniRL in 28 settings, and 6 with a bug planted, by running them.

Run it in an environment that has trl 1.16, verl 0.9.1, areal 1.0.4 and unirl 0.2 (this project needs none of them):

    python make_dumps.py [NAME…]

TRL's are real steps of its GRPOTrainer on a tiny random model; of the others, their functions of advantages,
weights and losses are called as their workers call them. What writes the files are the lines in docs/shadow.md.
"""

import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DUMPS = HERE / "dumps"
PAGE = HERE.parents[1] / "docs" / "shadow.md"
ROWS, WIDTH, SIZE = 8, 10, 4  # answers, their longest, and those of a group


def lines_for(peer: str) -> dict[str, Any]:
    """What the page's lines for a peer define."""
    (code,) = re.findall(rf"```python\n# {peer}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": peer}
    exec(compile(code, f"{PAGE.name}: {peer}", "exec"), names)
    return names


# --- TRL: the arguments of GRPOConfig, and what the settings say ---

PPO = {"kind": "ppo_clip"}
TRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "beta": 0.04}, {"penalty": {"kind": "k3", "coefficient": 0.04}}),
    "grpo_batch": (
        {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1, "use_bias_correction_kl": True},
        {"penalty": {"kind": "k3", "coefficient": 0.1}, "advantage": {"kind": "grpo", "scale": "batch"}},
    ),
    "bnpo": ({"loss_type": "bnpo", "epsilon": 0.1}, {"surrogate": PPO | {"epsilon_low": 0.1, "epsilon_high": 0.1}}),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"max_length": WIDTH}),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"surrogate": PPO | {"epsilon_low": 0.2, "epsilon_high": 0.28}},
    ),
    "dapo_truncated": ({"loss_type": "dapo", "mask_truncated_completions": True}, {}),
    "delta": (
        {"loss_type": "bnpo", "delta": 1.1, "epsilon": 0.3},
        {"surrogate": PPO | {"epsilon_low": 0.3, "epsilon_high": 0.3, "dual_clip": 1.1}},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"surrogate": {"kind": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.1}},
    ),
    "sapo": ({"loss_type": "sapo"}, {"surrogate": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02, "learning_rate": 4e-4},
        {"surrogate": PPO | {"epsilon_low": 0.02, "epsilon_high": 0.02}},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "learning_rate": 4e-4},
        {"surrogate": {"kind": "gspo", "epsilon_low": 0.02, "epsilon_high": 0.02}},
    ),
    "on_policy": ({"loss_type": "bnpo", "num_iterations": 1}, {}),
}


def tiny_model(folder: Path) -> Path:
    """A model and a tokenizer of a few thousand parameters, with random weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"abcdef"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), **sizes, eos_token_id=1, pad_token_id=0, initializer_range=0.25)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def reward(completions: list[str], **_: Any) -> list[float]:
    return [0.3 * text.count("a") + 0.7 * text.count("e") + 0.1 * len(text.split()) for text in completions]


def dump_trl(name: str, folder: Path) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback

    made, says = TRL[name]
    options = {"num_iterations": 2, "learning_rate": 0.004, "epsilon": 0.2} | made
    steps = options["num_iterations"]
    shadowed = lines_for("trl")["Shadowed"]
    args = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=ROWS // SIZE,
        num_generations=SIZE,
        max_completion_length=WIDTH,
        max_steps=steps,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        seed=3,
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )

    class LastStep(TrainerCallback):
        """Only the last step is kept: in it the policy has moved."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step:
                trainer.kept = []

    data = Dataset.from_dict({"prompt": ["a b c", "d e f a", "b d", "f e d c b"]})
    path = tiny_model(folder / "model")
    trainer = shadowed(
        model=AutoModelForCausalLM.from_pretrained(path),
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        processing_class=trl.trainer.grpo_trainer.AutoProcessor.from_pretrained(path),
        callbacks=[LastStep()],
    )
    seen = {}
    plain = trainer._compute_loss

    def counting(model: Any, inputs: Any) -> Any:
        seen["tokens"] = int(inputs["num_items_in_batch"])
        return plain(model, inputs)

    trainer._compute_loss = counting
    trainer.train()
    scale = trainer.current_gradient_accumulation_steps / args.steps_per_generation
    logs = trainer.state.log_history
    last = [entry for entry in logs if "grad_norm" in entry][-1]
    kept = ("clip_ratio/region_mean", "kl", "entropy", "cispo_clip_ratio")
    settings = {
        "peer": f"trl {trl.__version__}",
        "advantage": {"kind": "grpo", "scale": "group"},
        "tokens": round(seen["tokens"] * scale),
        "metrics": {key: last[key] for key in kept if key in last},
        **says,
    }
    trainer.write(DUMPS / f"trl_{name}.npz", settings)


# --- verl: a synthetic step through its functions ---


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) % 1000


def step(seed: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Log-probs, masks, rewards and groups of a step."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, width, generator=draw, dtype=torch.float64)

    old = -2.5 * torch.rand(ROWS, width, generator=draw, dtype=torch.float64) - 0.3
    lengths = torch.randint(2, width + 1, (ROWS,), generator=draw)
    lengths[0] = width
    made = {
        "old_log_probs": old,
        "log_prob": old + normal(0.25),
        "rollout_log_probs": old + normal(0.2),
        "ref_log_prob": old + normal(0.3),
    }
    made = {name: value.clamp(max=-0.01).to(dtype) for name, value in made.items()}
    made["response_mask"] = (torch.arange(width) < lengths[:, None]).to(torch.int64)
    made["responses"] = torch.randint(5, 900, (ROWS, width), generator=draw)
    made["reward"] = torch.randint(0, 8, (ROWS,), generator=draw).to(dtype) / 4
    made["group"] = torch.arange(ROWS) // SIZE
    return made


VERL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # the loss of each micro-batch over its own tokens, and of the whole mini-batch
    "token_mean_local": ({"micro": 4, "local": True}, {}),
    "token_mean_global": ({"micro": 4}, {}),
    "seq_mean_token_mean": ({"micro": 4, "local": True, "loss_agg_mode": "seq-mean-token-mean"}, {}),
    "sum_norm_width": ({"loss_agg_mode": "seq-mean-token-sum-norm", "dtype": torch.float64}, {}),
    "low_var_kl": (
        {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.05, "estimator": "rloo"},
        {"penalty": {"kind": "k1", "coefficient": 0.05}, "advantage": {"kind": "rloo"}},
    ),
    "rollout_weights": (
        {"is": "token", "threshold": 1.2, "micro": 4},
        {"correction": {"kind": "importance", "upper": 1.2, "level": "sequence"}},
    ),
    "gspo": (
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "low": 0.03, "high": 0.04},
        {"surrogate": {"kind": "gspo", "epsilon_low": 0.03, "epsilon_high": 0.04}},
    ),
    "gae": (
        {"estimator": "gae", "gamma": 0.9, "lam": 0.8, "kl_in_reward": "low_var_kl", "beta": 0.1},
        {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False}, "reward_kl": {"coefficient": 0.1}},
    ),
    "rfpp_baseline": (
        {"estimator": "reinforce_plus_plus_baseline", "low": 0.1, "high": 0.1, "dtype": torch.float64},
        {"surrogate": PPO | {"epsilon_low": 0.1, "epsilon_high": 0.1}},
    ),
}


def dump_verl(name: str, bug: str | None = None, target: str | None = None) -> None:
    import verl
    from tensordict import TensorDict
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

    options, says = VERL[name]
    data = step(seed_of(name), options.get("dtype", torch.float32))
    mask = data["response_mask"]
    token_rewards = torch.zeros_like(data["log_prob"])
    token_rewards[torch.arange(ROWS), mask.sum(1) - 1] = data["reward"]
    shown = dict(data)  # what the dump says, where a bug is planted in the computation
    groups = data["group"].roll(1) if bug == "group" else data["group"]
    compute = core_algos.get_adv_estimator_fn(options.get("estimator", "grpo"))
    given = {"token_level_rewards": token_rewards, "response_mask": mask}
    if "gamma" in options:
        draw = torch.Generator().manual_seed(1)
        data["values"] = shown["values"] = torch.randn(mask.shape, generator=draw)
        # as the trainer's apply_kl_penalty
        kl = core_algos.kl_penalty(data["old_log_probs"], data["ref_log_prob"], options["kl_in_reward"])
        given["token_level_rewards"] = token_rewards - options["beta"] * kl * mask
        given |= {"values": data["values"], "gamma": options["gamma"], "lam": options["lam"]}
    else:
        given["index"] = groups.numpy()
    advantages, _ = compute(**given)
    data["advantages"] = shown["advantages"] = advantages.to(data["log_prob"].dtype)
    if "is" in options:
        weights, *_ = compute_rollout_correction_weights(
            data["old_log_probs"] - data["rollout_log_probs"],
            mask,
            rollout_is=options["is"],
            rollout_is_threshold=options["threshold"],
        )
        data["rollout_is_weights"] = shown["rollout_is_weights"] = weights
    if bug == "mask":
        data["response_mask"] = mask.roll(1, 1)
    if bug == "stale":
        data["old_log_probs"] = data["old_log_probs"].clone()
        data["old_log_probs"][1, :3] -= 0.1
    if bug == "weight":
        data["rollout_is_weights"] = weights.clone()
        data["rollout_is_weights"][1, 1] *= 2
    if bug == "ratio":
        data["old_log_probs"] = 2 * data["log_prob"] - data["old_log_probs"]
    low = options.get("low", 0.2)
    high = options.get("high", 0.2)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=SIZE,
        ppo_mini_batch_size=ROWS,
        ppo_micro_batch_size_per_gpu=options.get("micro", ROWS),
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        loss_agg_mode=options.get("loss_agg_mode", "token-mean"),
        use_kl_loss=options.get("use_kl_loss", False),
        kl_loss_type=options.get("kl_loss_type", "low_var_kl"),
        kl_loss_coef=options.get("kl_loss_coef", 0.0) * (-1 if bug == "kl" else 1),
        policy_loss=PolicyLossConfig(loss_mode=options.get("loss_mode", "vanilla")),
    )
    size, kept = options.get("micro", ROWS), []
    count = ROWS // size
    clipped = []
    for number in range(count):
        rows = slice(number * size, (number + 1) * size)
        part = {key: value[rows] for key, value in data.items()}
        leaf = part["log_prob"].clone().requires_grad_()
        fields = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
        micro = TensorDict({key: part[key] for key in fields if key in part}, batch_size=[size])
        whole = {} if options.get("local") else {"batch_num_tokens": int(mask.sum()), "global_batch_size": ROWS}
        for key in ("batch_num_tokens", "global_batch_size"):
            tensordict_utils.assign_non_tensor(micro, **{key: whole.get(key)})
        tensordict_utils.assign_non_tensor(micro, dp_size=1)
        # the response's rows are padded already
        losses.no_padding_2_padding = lambda values, _: values
        loss, metrics = losses.ppo_loss(config, {"log_probs": leaf}, micro)
        clipped.append(float(metrics["actor/ppo_kl"].values[0]))
        # without the counts of the mini-batch, a worker divides the loss of a micro-batch by their number
        loss = loss / count if options.get("local") else loss
        kept.append(({key: value[rows] for key, value in shown.items() if key != "log_prob"}, leaf, loss))
    surrogate = PPO | {"epsilon_low": low, "epsilon_high": high, "dual_clip": 3.0}
    settings = {"peer": f"verl {verl.__version__}", "surrogate": surrogate, **says}
    settings["metrics"] = {"actor/ppo_kl": sum(clipped) / count}
    file = DUMPS / f"{target or f'verl_{name}'}.npz"
    lines_for("verl")["write"](file, kept, settings)


# --- AReaL: its loss, called as its actor does ---

AREAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoupled": ({"eps_clip": 0.2, "eps_clip_higher": 0.3}, {"high": 0.3}),
    "sequence": ({"eps_clip": 0.03, "importance_sampling_level": "sequence"}, {"low": 0.03, "high": 0.03}),
    "dual_clip": ({"eps_clip": 0.2, "c_clip": 1.3}, {"dual_clip": 1.3}),
    "capped": (
        {"eps_clip": 0.2, "sampling": {"level": "token", "action": "clamp", "metric": "ratio", "upper": 1.2}},
        {"correction": {"kind": "importance", "bound": "clamp", "upper": 1.2}},
    ),
}


def dump_areal(name: str, bug: str | None = None, target: str | None = None) -> None:
    import areal
    from areal.api.cli_args import RejectionSamplingConfig

    options, says = AREAL[name]
    data = step(seed_of(name))
    draw = torch.Generator().manual_seed(seed_of(name))
    options = dict(options)
    if "sampling" in options:
        options["rejection_sampling"] = RejectionSamplingConfig(**options.pop("sampling"))
    advantages = torch.randn(ROWS, 1, generator=draw).expand(ROWS, WIDTH).contiguous()
    says = dict(says)
    surrogate = PPO | {"epsilon_low": says.pop("low", 0.2), "epsilon_high": says.pop("high", 0.2)}
    if "dual_clip" in says:
        surrogate["dual_clip"] = says.pop("dual_clip")
    settings = {"peer": f"areal {areal.__version__}", "surrogate": surrogate, "centre": "rollout", **says}
    lines_for("areal")["shadowed"](
        DUMPS / f"{target or f'areal_{name}'}.npz",
        settings,
        logprobs=data["log_prob"].clone().requires_grad_(),
        proximal_logprobs=data["old_log_probs"],
        old_logprobs=data["rollout_log_probs"],
        advantages=advantages,
        loss_mask=data["response_mask"].bool(),
        **options,
    )


# --- UniRL: its algorithms, whose stage gives them log-probs ---

UNIRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"clip_range": 0.2, "clip_range_high": 0.3}, {"high": 0.3}),
    "empty_answer": ({"clip_range": 0.2, "loss_agg_mode": "seq-mean-token-mean", "empty": True}, {}),
    "horizon": ({"clip_range": 0.2, "loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 40}, {"max_length": 40}),
}


def dump_unirl(name: str) -> None:
    from importlib.metadata import version

    from unirl.types.segments.text import TextSegment

    of_name, said = UNIRL[name]
    options = dict(of_name)
    says = dict(said)
    empty = options.pop("empty", False)
    data = step(seed_of(name))
    mask = data["response_mask"].bool()
    inside = mask.clone()
    if empty:
        inside[2] = False  # an answer that was cut at the limit, which is not in the loss
    draw = torch.Generator().manual_seed(seed_of(name))
    advantages = torch.randn(ROWS, generator=draw)
    size = ROWS // 2
    algorithm = lines_for("unirl")["Shadowed"](stage=Stage(), **options)
    algorithm.kept = []
    for first in range(0, ROWS, size):
        rows = slice(first, first + size)
        here = mask[rows]
        packed = {key: data[key][rows][here] for key in ("log_prob", "old_log_probs", "rollout_log_probs", "responses")}
        lengths = here.sum(1).tolist()
        segment = TextSegment.pack(
            tokens=list(packed["responses"].split(lengths)),
            log_probs=list(packed["old_log_probs"].split(lengths)),
            rollout_log_probs=list(packed["rollout_log_probs"].split(lengths)),
            loss_mask=list(inside[rows][here].long().split(lengths)),
        )
        algorithm.stage.log_prob = packed["log_prob"]
        called = {"conditions": {}, "training_progress": 0.0, "loss_scale": size / ROWS}
        algorithm.compute_loss_and_backward(segment=segment, advantages=advantages[rows], **called)
    surrogate = PPO | {"epsilon_low": 0.2, "epsilon_high": says.pop("high", 0.2)}
    settings = {"peer": f"unirl {version('unirl')}", "surrogate": surrogate, **says}
    more = {"truncated": (torch.arange(ROWS) == 2).numpy()} if empty else {}
    algorithm.write(DUMPS / f"unirl_{name}.npz", settings, **more)


class Stage:
    """What replays a segment: it has the log-probs."""

    log_prob: torch.Tensor

    def replay(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.log_prob.clone().requires_grad_()


BUGS = {
    "mask": "token_mean_global",
    "group": "token_mean_local",
    "ratio": "seq_mean_token_mean",
    "kl": "low_var_kl",
    "stale": "gspo",
    "weight": "rollout_weights",
}


def main(names: list[str]) -> None:
    DUMPS.mkdir(exist_ok=True)
    made = {f"trl_{name}": (lambda name=name: of_trl(name)) for name in TRL}
    made |= {f"verl_{name}": (lambda name=name: dump_verl(name)) for name in VERL}
    made |= {f"areal_{name}": (lambda name=name: dump_areal(name)) for name in AREAL}
    made |= {f"unirl_{name}": (lambda name=name: dump_unirl(name)) for name in UNIRL}
    made |= {
        f"bug_{bug}": (lambda bug=bug, name=name: dump_verl(name, bug, f"bug_{bug}")) for bug, name in BUGS.items()
    }
    for name, make in made.items():
        if not names or name in names:
            make()
            size = (DUMPS / f"{name}.npz").stat().st_size
            print(f"{name}: {size:,} bytes")


def of_trl(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dump_trl(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
