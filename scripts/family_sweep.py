"""Every causal language model type of transformers, as a tiny random model: trainer and engine against its own logits.

python scripts/family_sweep.py [NAME ...]       the verdicts, as JSON lines
python scripts/family_sweep.py --write          all of them, into the tables of docs/models.md

A type agrees (the largest difference in nats), is refused (by proxima, in one line), or can't be built here; `wrong` is
none of these. Variants of a type: its logits scaled or capped by each field that does so, a sliding window, and
positions that depend on the longest sequence.
"""

import argparse
import asyncio
import copy
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "models.md"
BEGIN, END = "<!-- scripts/family_sweep.py makes these tables -->\n", "<!-- end of the tables -->\n"
LARGEST = 1e-4  # nats
BATCH, SECONDS, PROCESSES = 8, 900, 2
MOST_NAMED = 40  # types of a variant in a cell
FALLBACKS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 2, "head_dim": 16},
    {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    {"is_decoder": True},
)
SHAPES = ((7, 5), (3, 12), (1, 24), (20, 14))  # tokens of prompt and response
DRAWN = re.compile(r".*(drop|jitter|noise).*(?<!_mode)(?<!_type)")  # what a released model may draw in training mode
DRAWS = "dropout and noise"  # a variant that must agree, and is in no table
OF_LOGITS = re.compile(r".*(logit.*(cap|scal|mult|width)|lm_head_mult|output_mult).*")


@cache
def types() -> list[str]:
    """The names of all types; one that is another name of a config is left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({CONFIG_MAPPING[name].model_type for name in NAMES})


def class_of(name: str) -> tuple[Any, Any]:
    """The class of a type and that of its config; those of the others are not imported."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[name]
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    return kind[0] if isinstance(kind, tuple) else kind, config


def made(kind: Any, config: Any) -> Any:
    """A model with weights drawn wide; the same for the same config."""
    import torch

    torch.manual_seed(3)
    model = kind(copy.deepcopy(config)).eval().float()
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.dim():
                p.add_(torch.randn(p.shape, generator=draws) * (0.15 if p.dim() > 1 else 0.05))
    return model


def configs(kind: Any, config_class: Any) -> Iterator[tuple[str, Any]]:
    """A tiny config of a class that can be built, and its variants; raises the class's first error if none can."""
    import torch

    from proxima.model.tiny_twin import tiny_config

    base, errors = None, []
    for more in FALLBACKS:
        try:
            config = config_class(**more)
            if kind.config_class is not type(config):
                config = config.get_text_config()
            base = tiny_config(config)
            with torch.no_grad():
                made(kind, base)(input_ids=torch.arange(3, 40)[None], use_cache=False)
            break
        except Exception as error:
            base = None
            errors.append(error)
    if base is None:
        raise errors[0]
    yield "", base
    for variant, values in changes(base):
        try:
            config = changed(base, values)
            made(kind, config)
        except Exception:  # the type has no such variant
            continue
        yield variant, config


def changes(base: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a variant of a config changes."""
    for name, value in vars(base).items():
        if OF_LOGITS.fullmatch(name) and (value is None or isinstance(value, int | float)):
            yield name, {name: 2.5}
    drawn = {
        name: 0.2 for name, value in vars(base).items() if DRAWN.fullmatch(name) and isinstance(value, int | float)
    }
    if drawn:
        yield DRAWS, drawn
    if hasattr(base, "sliding_window") and not base.sliding_window:
        window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
        yield "sliding_window", {name: value for name, value in window.items() if hasattr(base, name)}
    rope = getattr(base, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        short = {"max_position_embeddings": 16, "rope_parameters": rope | {"rope_type": "dynamic", "factor": 4.0}}
        yield "dynamic", short
        half = int((getattr(base, "head_dim", None) or 16) * rope.get("partial_rotary_factor", 1.0)) // 2
        long = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
        long |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
        yield "longrope", {"rope_parameters": rope | long, "original_max_position_embeddings": 16}


def changed(config: Any, values: dict[str, Any]) -> Any:
    fields = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype")}
    return type(config)(**fields | values)


def ids(count: int, seed: int, most: int) -> tuple[int, ...]:
    import torch

    return tuple(torch.randint(3, most, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def own_log_prob(model: Any, row: Any) -> Any:
    import torch

    with torch.no_grad():
        tokens = torch.tensor([[*row.prompt_tokens, *row.tokens]])
        log_prob = model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
    count = len(row.prompt_tokens)
    return torch.stack([log_prob[count - 1 + i, token] for i, token in enumerate(row.tokens)])


def trainer(kind: Any, config: Any, *, both: bool) -> tuple[float, str]:
    """With layers that are recomputed in the backward pass, if the type has layers; with `both` without that too."""
    import torch

    from proxima.data import FieldError
    from proxima.data.trajectory import Trajectory
    from proxima.model.policy import Policy
    from proxima.model.pretrained import LoadedModel
    from tests.tiny import tiny_tokenizer

    most, alone = config.get_text_config().vocab_size, made(kind, config)
    rows = [
        Trajectory(prompt_tokens=ids(p, i, most), tokens=ids(r, 50 + i, most), group=i)
        for i, (p, r) in enumerate(SHAPES)
    ]
    expected = torch.cat([own_log_prob(alone, row) for row in rows])
    errors = []
    for checkpointing in (False, True) if both else (True, False):
        if errors and not both:
            break
        loaded = LoadedModel(model=made(kind, config).train(), tokenizer=tiny_tokenizer(), path="tiny")
        try:
            policy = Policy(loaded, gradient_checkpointing=checkpointing)
        except FieldError as refusal:
            if checkpointing and refusal.field.endswith("gradient_checkpointing"):  # it has no layers
                continue
            raise
        first, again = (policy(policy.pack(rows)).log_prob.detach() for _ in range(2))
        if not torch.equal(first, again):
            raise ValueError(f"two passes are {float((first - again).abs().max()):.2g} nats apart")
        errors.append(float((first - expected).abs().max()))
    return max(errors), policy.attention


def engine(kind: Any, config: Any) -> tuple[float, str]:
    import torch

    from proxima.data.flow import Prompt
    from proxima.data.trajectory import Trajectory
    from proxima.engine.local.local_engine import Local, LocalEngine, collect
    from proxima.engine.protocol import Request, Sampling
    from proxima.model.pretrained import LoadedModel
    from tests.tiny import tiny_tokenizer

    loaded = LoadedModel(model=made(kind, config), tokenizer=tiny_tokenizer(), path="tiny")
    built, alone = LocalEngine(loaded, Local(slots=8, dtype="float32")), made(kind, config)
    most = config.get_text_config().vocab_size
    prompts = [Prompt(uid=i, messages=(), tokens=ids(n, 100 + i, most)) for i, n in enumerate((7, 1, 12))]
    asked = [Request(prompt=p, sample=0, sampling=Sampling(max_tokens=12), seed=5) for p in prompts]
    given = asyncio.run(collect(built, asked))
    rows = [Trajectory.of(a.prompt, c, group=0, advantage=0.0) for a, c in zip(asked, given, strict=True)]
    told = torch.tensor([x for c in given for x in c.sampled_log_prob])
    error = float((told - torch.cat([own_log_prob(alone, row) for row in rows])).abs().max())
    return error, type(built.scheduler.decoder).__name__.removesuffix("Decoder").lower()


def verdict(measure: Any, kind: Any, config: Any) -> dict[str, Any]:
    from proxima.data import UserError

    try:
        error, how = measure(kind, config)
    except UserError as refusal:
        return {"verdict": "refused", "reason": refusal.reason}
    except Exception as bug:
        return {"verdict": "wrong", "reason": f"{type(bug).__name__}: {(str(bug).splitlines() or [''])[0][:120]}"}
    return {"verdict": "agrees" if error <= LARGEST else "wrong", "nats": error, "how": how}


def sweep(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The verdicts of the types of these names, one for each variant."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    for name in names:
        kind, config_class = class_of(name)
        found = {"name": name, "class": kind.__name__}
        try:
            variants = dict(configs(kind, config_class))
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
            yield found | {"variant": "", "built": reason}
            continue
        # what agrees although it could draw, agrees without: nothing is drawn in eval mode
        if DRAWS in variants and agrees(drawn := measured(kind, variants[DRAWS], bare=True)):
            yield found | {"variant": ""} | drawn
            del variants[""], variants[DRAWS]
        for variant, config in variants.items():
            yield found | {"variant": variant} | measured(kind, config, bare=not variant)


def measured(kind: Any, config: Any, *, bare: bool) -> dict[str, Any]:
    """The verdicts of both sides; the trainer of what is not `bare` runs in one way."""
    return {"trainer": verdict(partial(trainer, both=bare), kind, config), "engine": verdict(engine, kind, config)}


def agrees(row: dict[str, Any]) -> bool:
    return all(row[side]["verdict"] == "agrees" for side in ("trainer", "engine"))


def swept(names: Sequence[str]) -> list[dict[str, Any]]:
    """`sweep` in other processes, a few types each, so that one that crashes ends no other's."""
    cuts = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        return [row for rows in pool.map(_in_process, cuts) for row in rows]


def _in_process(names: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).resolve()), *names]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            cwd=REPOSITORY,
            check=False,
        )
        said = ran.stdout
    except subprocess.TimeoutExpired as late:
        if isinstance(late.stdout, bytes):
            said = (late.stdout or b"").decode()
        else:
            said = late.stdout or ""
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    lacking = [name for name in names if name not in {row["name"] for row in rows}]
    if len(names) == 1:
        return rows or [{"name": names[0], "variant": "", "built": "ends its process"}]
    return rows + [row for name in lacking for row in _in_process([name])]


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The verdicts that are neither agreement nor refusal."""
    return [
        f"{row['name']} {row['variant']}, {side}: {row[side]}"
        for row in rows
        for side in ("trainer", "engine")
        if side in row and row[side]["verdict"] == "wrong"
    ]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of the page: the types by how they are run, and by variant."""
    groups: dict[tuple[str, str], list[str]] = {}
    variants: dict[str, dict[str, list[str]]] = {}
    counts, largest = {"agree": 0, "refused": 0}, 0.0
    for row in rows:
        if "built" in row:
            groups.setdefault(("not built", ""), []).append(row["name"])
            continue
        sides = [row[side] for side in ("trainer", "engine")]
        largest = max(largest, *(side["nats"] for side in sides if side["verdict"] == "agrees"), 0.0)
        if row["variant"] == DRAWS:
            continue
        if row["variant"]:
            how = {"agrees": "agree", "refused": "refused"}.get(sides[0]["verdict"], sides[0]["verdict"])
            variants.setdefault(row["variant"], {}).setdefault(how, []).append(row["name"])
            continue
        counts["agree" if sides[0]["verdict"] == "agrees" else "refused"] += 1
        cells = tuple(_cell(side, row["class"]) for side in sides)
        groups.setdefault((cells[0], "" if cells[0] == cells[1] else cells[1]), []).append(row["name"])
    total, absent = len({row["name"] for row in rows}), sum("built" in row for row in rows)
    lines = [
        f"{total} types: {counts['agree']} agree in the trainer, {counts['refused']} are refused, {absent} can't be "
        f"built tiny here. The largest difference is {largest:.0e} nats.",
        "",
        "| trainer | engine | types |",
        "|---|---|---|",
    ]
    order = sorted(groups, key=lambda cells: (cells[0].startswith(("not built", "refused", "wrong")), cells))
    lines += [f"| {cells[0]} | {cells[1]} | {', '.join(sorted(groups[cells]))} |" for cells in order]
    lines += ["", "| variant | agree | refused |", "|---|---|---|"]
    lines += [
        f"| {variant} | {_named(found.get('agree', []))} | {_named(found.get('refused', []))} |"
        for variant, found in sorted(variants.items())
    ]
    return "\n".join(lines) + "\n"


def _named(names: Sequence[str]) -> str:
    """The names, or their number where there are many."""
    if len(names) <= MOST_NAMED:
        return ", ".join(sorted(names))
    return f"{len(names)} types"


def _cell(found: dict[str, Any], name: str) -> str:
    if found["verdict"] == "agrees":
        return str(found["how"])
    reason = found.get("reason", f"off by {found.get('nats', 0):.1e} nats").removeprefix(f"{name} is not supported: ")
    reason = re.sub(r"( ?[(]|: off by ).*", "", reason)  # figures differ from type to type
    return f"{found['verdict']}: {_plain(reason)}"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if not given.write:
        for row in sweep(given.names or types()):
            print(json.dumps(row), flush=True)
        return 0
    rows = swept(types())
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}", encoding="utf-8")
    print("\n".join(wrong(rows)) or "none is wrong")
    return bool(wrong(rows))


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]
    sys.exit(main())
