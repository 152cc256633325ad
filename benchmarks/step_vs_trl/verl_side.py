"""The other peer: verl's PPO trainer with FSDP and vLLM on the demo's job, on one GPU. Runs in its own environment,
without proxima."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's custom reward: 1 if the last number of the completion is right."""
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def write_prompts(settings: dict[str, Any], file: Path) -> None:
    """Write the questions in verl's format."""
    from datasets import Dataset

    draw = random.Random(settings["seed"])
    rows = []
    for index in range(settings["prompts"] * settings["steps"]):
        a, b = draw.randint(1, settings["high"]), draw.randint(1, settings["second_high"])
        messages = [
            {"role": "system", "content": settings["system"]},
            {"role": "user", "content": f"What is {a} + {b}?"},
        ]
        rows.append(
            {
                "data_source": "addition",
                "prompt": messages,
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index},
            }
        )
    Dataset.from_list(rows).to_parquet(str(file))


def overrides(settings: dict[str, Any], prompts: Path, *, flash: bool) -> list[str]:
    """Return verl's overrides for the job, with the settings that are fastest for it here: whole batches, old log-probs
    from the rollout as on our side, a server that stays in memory, and sequences without padding if flash-attention is
    installed."""
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    dtype = "bfloat16" if settings["bf16"] else "float32"
    tokens = 128  # at most in a prompt
    words = {
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": settings["prompts"],
        "data.max_prompt_length": tokens,
        "data.max_response_length": settings["max_tokens"],
        "data.dataloader_num_workers": 1,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        f"{model}.path": Path(settings["model"]).resolve(),
        f"{model}.use_remove_padding": flash,
        f"{model}.enable_gradient_checkpointing": settings["gradient_checkpointing"],
        f"{actor}.ppo_mini_batch_size": settings["prompts"] // settings["updates"],
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": settings["prompts"]
        * settings["completions"]
        * (tokens + settings["max_tokens"]),
        f"{actor}.optim.lr": settings["lr"],
        f"{actor}.optim.lr_warmup_steps": 5,
        f"{actor}.fsdp_config.dtype": dtype,
        f"{rollout}.name": "vllm",
        f"{rollout}.dtype": dtype,
        f"{rollout}.n": settings["completions"],
        f"{rollout}.temperature": 1.0,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.4,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.max_model_len": tokens + settings["max_tokens"],
        "reward.custom_reward_function.path": Path(__file__).resolve(),
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": settings["steps"],
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console]",
        "ray_kwargs.ray_init.num_cpus": 64,  # a count, not cores: each of verl's small actors waits for one
    }
    if not flash:
        words[f"+{model}.override_config.attn_implementation"] = "sdpa"
    return [f"{name}={value}" for name, value in words.items()]


class Trainer:
    """verl's program, held after each of its steps.

    Args:
        words: its overrides.
        folder: for the files that control it.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        held = {"HELD_VERL_FOLDER": str(folder), "VERL_USE_EXTERNAL_MODULES": "benchmarks.step_vs_trl.verl_hold"}
        held["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self.folder, self.step = folder, 0
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        # in the folder, because Hydra writes its own files there
        self.process = subprocess.Popen(command, cwd=folder, env=os.environ | held, start_new_session=True)

    def next(self) -> dict[str, float]:
        """Run the next step and return the numbers that verl logs of it."""
        if self.step:
            (self.folder / f"go-{self.step}").touch()
        self.step += 1
        logged = self.folder / f"step-{self.step}.json"
        while not logged.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"verl ended with exit code {self.process.returncode} before step {self.step}")
            time.sleep(0.01)
        return json.loads(logged.read_text(encoding="utf-8"))

    def end(self) -> None:
        """Terminate the program, so that Ray stops its own processes; kill it after 20 s."""
        for signum, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signum)
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue


def measured(logged: dict[str, float]) -> dict[str, float]:
    """Return the logged numbers that the table needs."""
    return {
        "seconds": logged["timing_s/step"],
        "reward": logged["critic/score/mean"],
        "length": logged["response_length/mean"],
    }


def main() -> None:
    from benchmarks.side import Channel, argument, serve

    channel, settings = Channel(), argument()
    folder = Path(settings["folder"]) / "verl"
    folder.mkdir()
    write_prompts(settings, folder / "prompts.parquet")
    flash = importlib.util.find_spec("flash_attn") is not None
    trainer = Trainer(overrides(settings, folder / "prompts.parquet", flash=flash), folder)
    try:
        trainer.next()  # loads, compiles, and runs the first step, which no side measures
        versions = {name: metadata.version(name) for name in ("verl", "vllm", "transformers", "torch", "ray")}
        serve(lambda: measured(trainer.next()), channel, ready=True, versions=versions | {"flash_attention": flash})
    finally:
        trainer.end()


if __name__ == "__main__":
    main()
