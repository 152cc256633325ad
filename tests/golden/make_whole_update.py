"""Replace the peers' weights in whole_update.npz: those of a tiny Llama after three updates on stored rollouts, by the
trainers of TRL and verl.

    python make_whole_update.py trl     with trl==1.16.0
    python make_whole_update.py verl    with verl==0.7.0, torch.distributed on gloo

The weights before, the rollouts and the settings are read from the file, and stay. They were drawn once, weights by
torch.manual_seed(0), matrices times 8, and 16 completions of 4 prompts by numpy's default_rng(7): random tokens, 8, 1,
5 or 3 of them; rewards of a normal distribution, less their group's mean; the model's own log-probs, moved by normal
noise of .15 for the behavior and of .1 for the reference; weights e to the power of .4 times a normal, at most 2.
Nothing here is run by the tests.
"""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).with_name("whole_update.npz")
STORED = dict(np.load(FILE))
META = json.loads(STORED["meta"].tobytes())
TRL = {
    "trl_grpo": {"loss_type": "grpo", "beta": 0.0},
    "trl_dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
    "trl_bnpo_kl": {"loss_type": "bnpo", "beta": 0.05},
    "trl_sequence": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.05,
        "epsilon_high": 0.1,
        "beta": 0.0,
    },
}
VERL = {
    "verl_token_mean": {"loss_agg_mode": "token-mean", "clip_ratio_high": 0.28},
    "verl_seq_mean_token_sum_kl": {
        "loss_agg_mode": "seq-mean-token-sum",
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        "kl_loss_type": "low_var_kl",
    },
    "verl_seq_mean_token_mean_is": {"loss_agg_mode": "seq-mean-token-mean"},
    "verl_gspo": {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
}


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaForCausalLM(LlamaConfig(**META["config"], attn_implementation="eager")).float()
    before = {name: torch.from_numpy(STORED[f"before/{name}"]) for name, _ in made.named_parameters()}
    made.load_state_dict(before)
    return made


def padded():
    """Left-padded prompts and right-padded completions, as both trainers hold them."""
    rows = META["rollouts"]
    width, length = max(len(r["prompt_tokens"]) for r in rows), max(len(r["tokens"]) for r in rows)
    t = {
        name: torch.zeros(len(rows), size, dtype=torch.long)
        for name, size in (("prompt", width), ("prompt_mask", width), ("response", length), ("response_mask", length))
    }
    t |= {name: torch.zeros(len(rows), length) for name in ("behavior_log_prob", "reference_log_prob", "weight")}
    for i, row in enumerate(rows):
        own, size = len(row["prompt_tokens"]), len(row["tokens"])
        t["prompt"][i, width - own :] = torch.tensor(row["prompt_tokens"])
        t["prompt_mask"][i, width - own :] = 1
        t["response"][i, :size] = torch.tensor(row["tokens"])
        t["response_mask"][i, :size] = 1
        for name in ("behavior_log_prob", "reference_log_prob", "weight"):
            t[name][i, :size] = torch.tensor(row[name])
    return t | {"advantage": torch.tensor([row["advantage"] for row in rows])}


def state(name, made):
    return {f"{name}/{key}": value.detach().numpy().copy() for key, value in made.named_parameters()}


def by_trl():
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32)}, unk_token="t3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", bos_token="t2")
    t, out = padded(), {}
    for name, options in TRL.items():
        made = model()
        made.save_pretrained("/tmp/whole_update")  # the reference model is loaded from there
        made.config._name_or_path = "/tmp/whole_update"
        arguments = GRPOConfig(
            output_dir="/tmp/whole_update_run",
            per_device_train_batch_size=16,
            num_generations=4,
            num_iterations=META["updates"],
            steps_per_generation=1,
            max_steps=META["updates"],
            learning_rate=META["lr"],
            lr_scheduler_type="constant",
            adam_epsilon=META["eps"],
            max_grad_norm=META["max_grad_norm"],
            max_completion_length=8,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            temperature=1.0,
            **options,
        )
        trainer = GRPOTrainer(
            model=made,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["t5 t6"] * 8}),
            processing_class=tokenizer,
        )

        def stored(self, inputs, options=options):
            batch = {
                "prompt_ids": t["prompt"],
                "prompt_mask": t["prompt_mask"],
                "completion_ids": t["response"],
                "completion_mask": t["response_mask"],
                "advantages": t["advantage"],
                "old_per_token_logps": t["behavior_log_prob"],
                "num_items_in_batch": t["response_mask"].sum(),
            }
            if options["beta"]:
                batch["ref_per_token_logps"] = t["reference_log_prob"]
            return {key: value.clone() for key, value in batch.items()}

        trainer._generate_and_score_completions = types.MethodType(stored, trainer)
        trainer.train()
        out |= state(name, trainer.model)
    return out


def by_verl():
    import transformers

    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText  # its name before transformers 5
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from tensordict import TensorDict
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    t, out = padded(), {}
    mask = torch.cat([t["prompt_mask"], t["response_mask"]], 1)
    for name, options in VERL.items():
        config = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_mini_batch_size=16,
            ppo_micro_batch_size_per_gpu=16,
            ppo_epochs=META["updates"],
            use_torch_compile=False,
            grad_clip=META["max_grad_norm"],
            clip_ratio=0.2,
            clip_ratio_c=3.0,
            entropy_coeff=0.0,
            policy_loss=PolicyLossConfig(loss_mode="gspo" if name == "verl_gspo" else "vanilla"),
            **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **options},
        )
        object.__setattr__(config.fsdp_config, "dtype", "float32")
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=META["lr"], eps=META["eps"], weight_decay=0.0)
        batch = {
            "responses": t["response"],
            "response_mask": t["response_mask"],
            "input_ids": torch.cat([t["prompt"], t["response"]], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "old_log_probs": t["behavior_log_prob"],
            "advantages": t["advantage"][:, None].expand_as(t["weight"]).clone(),
        }
        if "use_kl_loss" in options:
            batch["ref_log_prob"] = t["reference_log_prob"]
        if name.endswith("_is"):
            batch["rollout_is_weights"] = t["weight"]
        data = DataProto(batch=TensorDict(batch, batch_size=16), meta_info={"temperature": 1.0})
        DataParallelPPOActor(config, made, optimizer).update_policy(data)
        out |= state(name, made)
    return out


if __name__ == "__main__":
    made = {"trl": by_trl, "verl": by_verl}[sys.argv[1]]()
    np.savez_compressed(FILE, **(STORED | made))
