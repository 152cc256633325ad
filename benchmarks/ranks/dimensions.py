"""Cases of tensor, context and expert parallelism, alone and combined: the presets' algorithms, spread over layouts."""

from collections.abc import Iterator

from benchmarks.ranks.cases import SMALLER, Case

T, C, E = (f"placement.{name}_parallel=2" for name in ("tensor", "context", "expert"))
LAYOUTS = {  # name: ranks, placement, and the cases: a model and an algorithm each
    "TP 2": (2, (T,), (("llama", "grpo"), ("qwen3", "cispo"), ("qwen3_moe", "cppo"))),
    "CP 2": (2, (C,), (("llama", "kl_cov"), ("qwen3", "dapo"), ("qwen3_moe", "gspo"))),
    "EP 2": (2, (E,), (("qwen3_moe", "dppo"), ("qwen3_moe", "decoupled"), ("qwen3_moe", "distill"))),
    "FSDP 2 × TP 2": (4, (T,), (("llama", "ppo"), ("qwen3", "rloo"), ("qwen3_moe", "drpo"))),
    "FSDP 2 × CP 2": (4, (C,), (("llama", "cppo_prune"), ("qwen3", "online_dpo"), ("qwen3_moe", "sapo"))),
    "FSDP 2 × EP 2": (4, (E,), (("qwen3_moe", "gmpo"), ("qwen3_moe", "m2po"), ("qwen3_moe", "dapo_no_dynamic"))),
    "TP 2 × CP 2": (4, (T, C), (("llama", "sdp"), ("qwen3", "clip_cov"), ("qwen3_moe", "dr_grpo"))),
    "CP 2 × EP 2": (4, (C, E), (("qwen3_moe", "reinforce"), ("qwen3_moe", "spo"))),
}
BALANCE = "router_balance: {coefficient: 0.01}"
ALGORITHM = {  # what an algorithm needs in addition to its preset
    "distill": "distillation: {path: MODELS/teacher}",
    "kl_cov": "surrogate: {kind: kl_cov, share: 0.3}, mismatch: {on_mismatch: warn}",  # a kink, see `cases.batches`
    "cppo": f"proximal: recompute, routing_replay: recompute, {BALANCE}",
    "decoupled": f"routing_replay: recompute, {BALANCE}",
    "gmpo": f"proximal: recompute, routing_replay: recompute, {BALANCE}",
    "reinforce": f"proximal: recompute, routing_replay: recompute, {BALANCE}",
}
RECIPES = {"ppo": "cpu/ppo_critic", "online_dpo": "cpu/online_dpo"}
STORED = ("kl_cov", "clip_cov", "m2po", "sapo", "gspo")  # trained on stored rollouts, as in `cases.batches`


def dimensions() -> Iterator[Case]:
    """Yield a case for each algorithm; the first of each layout is started by torchrun itself."""
    for layout, (ranks, placed, trained) in LAYOUTS.items():
        for number, (model, name) in enumerate(trained):
            more = ALGORITHM.get(name, BALANCE if model == "qwen3_moe" else "")
            given = f"{{preset: {name}{', ' if more else ''}{more}}}"
            yield Case(
                row="dimensions",
                name=f"{layout}, {model}, {name}",
                recipe=RECIPES.get(name, "quickstart"),
                model=model,
                overrides=(f"algorithm={given}", *SMALLER),
                placed=placed,
                sizes=(ranks,),
                sgd=True,
                torchrun=number == 0,
                replay=name in STORED,
                source=("model.path=MODELS/teacher",) if name == "kl_cov" else (),
            )
