"""Measure the mismatch of engine and trainer on bfloat16 mixtures of experts, with and without replayed routes."""

import asyncio
from statistics import fmean

from benchmarks.harness import finish, parser, table

FIGURES = ("mean", "p99", "max", "k3")


def main() -> None:
    p = parser(__doc__, repeats=4)
    p.add_argument("--prompts", type=int, default=16, help="of each model (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=64, help="most of a completion (default: %(default)s)")
    p.add_argument("--scales", type=float, nargs="+", default=[1.0, 4.0], help="of the routers (default: %(default)s)")
    o = p.parse_args()
    rows, measured = [], {}
    for scale in o.scales:
        models = [measure(seed, scale, o.prompts, o.tokens, o.threads) for seed in range(o.repeats)]
        means = {side: {name: fmean(m[side][name] for m in models) for name in FIGURES} for side in ("off", "rollout")}
        differing = fmean(m["differing"] for m in models)
        ratios = {name: means["off"][name] / means["rollout"][name] for name in FIGURES}
        measured[f"{scale:g}"] = means | {"differing": differing, "ratios": ratios, "models": models}
        for side, own in means.items():
            rows.append([f"{scale:g}", side, f"{differing:.2%}", *(f"{own[name]:.3g}" for name in FIGURES)])
    header = ["router scale", "routes", "experts that differ", "mean |gap|", "99 %", "largest", "KL (k3)"]
    print(f"Log-probs of engine and trainer in bfloat16, nats a token; the mean over {o.repeats} random models\n")
    print(table(header, rows))
    ratio = min(means["ratios"]["k3"] for means in measured.values())
    finish({"claim": "routing_replay", "ratio": round(ratio, 2), "scales": measured}, o.json_out)


def measure(seed: int, scale: float, prompts: int, tokens: int, threads: int) -> dict:
    """Generate completions with one random Qwen3-MoE, and measure the mismatch with and without their routes."""
    import torch

    from proxima.data import Trajectory
    from proxima.engine.local import Local, LocalEngine, collect
    from proxima.model import Policy

    torch.set_num_threads(threads)
    loaded, asked = mixture(seed, scale), requests(seed, prompts, tokens)
    engine = LocalEngine(loaded, Local(dtype="bfloat16", slots=32, routed_experts=True))
    completions = asyncio.run(collect(engine, asked))
    policy = Policy(loaded, compute_dtype=torch.bfloat16, replays_routes=True)
    out: dict = {}
    for side in ("off", "rollout"):
        trajectories = [
            Trajectory.of(request.prompt, completion, group=request.prompt.uid, advantage=0.0, routes=side == "rollout")
            for request, completion in zip(asked, completions, strict=True)
        ]
        batch = policy.pack(trajectories)
        with torch.no_grad():
            outputs = policy(batch)
        log_ratio = (outputs.log_prob - batch.behavior_log_prob).double()
        gap = log_ratio.abs()
        k3 = float((torch.expm1(log_ratio) - log_ratio).mean())
        out[side] = {"mean": float(gap.mean()), "p99": float(gap.quantile(0.99)), "max": float(gap.max()), "k3": k3}
    differing, replayed = outputs.route_counts.tolist()
    return out | {"differing": differing / replayed}


def mixture(seed: int, scale: float):
    """Create a random Qwen3-MoE with six layers of 32 experts, 4 of them for each token. `scale` multiplies the
    routers' weights: the larger it is, the more a token's output depends on its first expert."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from proxima.model import LoadedModel
    from tests.tiny import VOCABULARY, tiny_tokenizer

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(scale)
    return LoadedModel(model=model, tokenizer=tiny_tokenizer(), path="a random Qwen3-MoE")


def requests(seed: int, prompts: int, tokens: int) -> list:
    """Request two completions each of random prompts of 4 to 39 tokens."""
    import numpy as np

    from proxima.data import Prompt
    from proxima.engine import Request, Sampling

    draw = np.random.default_rng(seed)
    asked = [Prompt(uid=i, messages=(), tokens=draw.integers(3, 250, draw.integers(4, 40))) for i in range(prompts)]
    sampling = Sampling(max_tokens=tokens)
    return [Request(prompt=p, sample=i, sampling=sampling, seed=seed) for p in asked for i in range(2)]
