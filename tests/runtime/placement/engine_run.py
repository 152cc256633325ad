"""A supervisor of two ranks and two servers, as a program: FOLDER MODEL PROGRAM. And what its ranks do."""

import sys
from pathlib import Path

WORDS = (
    *("model.device=cpu", "model.compute_dtype=float32", "model.max_length=200", "runtime.threads=1"),
    *("train.steps=1000", "train.prompts_per_step=2", "train.completions_per_prompt=4", "sampling.max_tokens=4"),
    *("eval.task=null", "algorithm=grpo", "checkpoint.every=0", "data.system=null", "train.optimizer.lr=1e-2"),
    *("reward=[{kind: tests.runtime.tiny_run:Even}]", "placement=torchrun"),
    *("engine={kind: vllm, health_seconds: 0.3, interrupt: finish}",),
)


def train_rank(folder: str, model: str, resume: bool = False) -> int:
    from proxima.cli.main import main

    return main(["train", "quickstart", f"model.path={model}", f"folder={folder}/run", *WORDS])


def main() -> int:
    from proxima.config.sections.ranks_section import RayPlacement
    from proxima.engine.serve import Serve
    from proxima.runtime.placement.engine_host import EnginePlan
    from proxima.runtime.placement.ray_supervisor import supervise

    folder, model, program = sys.argv[1:]
    fractions = {"gpus_per_rank": 0, "cpus_per_rank": 0.25, "gpus_per_engine": 0, "cpus_per_engine": 0.25}
    spec = RayPlacement(ranks=2, engines=2, restarts=0, **fractions)
    plan = EnginePlan(kind="vllm", serve=Serve(executable=program), model=model, log=Path(folder, "engine.log"))
    call = {"folder": folder, "model": model}
    return supervise(train_rank, spec, call, engines=plan, log=Path(folder, "ranks.log"))


if __name__ == "__main__":
    from tests.runtime.placement import engine_run  # so that the ranks find the function by its module

    sys.exit(engine_run.main())
