"""Every causal language model type of transformers, exported: read by an older transformers as by this one.

pip install --target OLD "transformers==4.57.6" "peft==0.18.1"
PROXIMA_OLD_TRANSFORMERS=OLD python scripts/family_exports.py [NAME ...]      the verdicts, as JSON lines

A tiny model of each type, with a base of its positions that is no family's default, is written by transformers, read,
written as an export is, and read by both versions. `nats` is the largest difference between their log-probs; `changed`
names the fields of config.json in which the export differs from what was read. Where it is known that the versions
compute a type in different ways, `own` is that difference for a folder which the older one made and wrote.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
OLD = "PROXIMA_OLD_TRANSFORMERS"  # a folder with the older version
BATCH = 16  # types of a process
TOKENS = tuple(range(3, 99))
SCALINGS: dict[str, dict[str, Any]] = {  # of the type llama
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
FITTED: dict[str, dict[str, Any]] = {  # fields that follow from others in any real config, and 4.57 works out itself
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"use_mamba_kernels": False},  # follows from nothing: without it 4.57 runs on a GPU only
    "modernbert-decoder": {"local_attention": 8, "sliding_window": 4},
    "zamba2": {"attention_head_dim": 32},
}


@dataclass(frozen=True)
class Difference:
    """A type that 4.57 computes in another way, whatever is written: a folder that it wrote itself differs too.

    Args:
        reason: what 4.57 does.
        nats: about how far apart the log-probs of both versions were.
        alike: the variant in which that can't show, so that the versions must agree.
    """

    reason: str
    nats: float
    alike: str


DIFFERENT = {
    "apertus": Difference("keeps two parameters of its activation in bfloat16", 0.0025, "apertus-bfloat16"),
    "gemma3n_text": Difference(
        "shares keys and values between layers through its cache alone, and nothing is cached here",
        1.6,
        "gemma3n_text-none-shared",
    ),
    "mamba2": Difference("norms all groups of a layer together", 5.0, "mamba2-one-group"),
    "modernbert-decoder": Difference(
        "has one base of positions for both kinds of layers", 0.86, "modernbert-decoder-one-base"
    ),
    "moshi": Difference("heeds the attention window, as version 5 does not", 6.7, "moshi-wide-window"),
    "qwen3_next": Difference("adds in another order; wide weights amplify it", 7e-5, "qwen3_next-narrow"),
    "recurrent_gemma": Difference(
        "lets its attention see beyond the window where nothing is cached", 4.5, "recurrent_gemma-wide-window"
    ),
    "zamba2": Difference("sums the states of chunks along the wrong axis", 0.16, "zamba2-one-chunk"),
}
UNREADABLE = {  # types that 4.57 can't read or run, whatever is written; a part of what it says
    "cpmant": "size mismatch",  # its head has rows for prompts too
    "emu3": "emu3_text_model",  # a type of the part about text alone is new
    "mllama": "mllama_text_model",  # likewise
    "xlstm": "is invalid for input of size",  # its code for such chunks fails, on a folder of its own too
}
READER = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    try:
        AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.eval().float()
        ids, expected = torch.load(f"{folder}/expected.pt")
        with torch.no_grad():
            given = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.log_softmax(-1)
        print(json.dumps({"folder": folder, "nats": float((given - expected).abs().max())}), flush=True)
    except Exception as error:
        print(json.dumps({"folder": folder, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
"""
MAKER = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
transformers.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    own = f"{folder}-own"
    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.05))
    made.save_pretrained(own)
    AutoTokenizer.from_pretrained(folder).save_pretrained(own)
    model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32, attn_implementation="eager")
    model.eval().float()
    ids = torch.load(f"{folder}/expected.pt")[0]
    with torch.no_grad():
        given = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.log_softmax(-1)
    torch.save((ids, given), f"{own}/expected.pt")
"""


def moved(config: Any) -> Any:
    """The config with other bases of its positions, none of them a family's default."""
    from scripts.family_sweep import changed

    rope = copy.deepcopy(getattr(config, "rope_parameters", None))
    if not isinstance(rope, dict) or not rope:
        return config
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and "rope_theta" in part:
            part["rope_theta"] *= 0.07
    return changed(config, {"rope_parameters": rope})


def models(name: str) -> Iterator[tuple[str, Any]]:
    """Models of a type, by the name of their variant."""
    from scripts.family_sweep import changed, changes, class_of, configs, made

    kind, config_class = class_of(name)
    _, base = next(configs(kind, config_class))
    base = changed(moved(base), FITTED.get(name, {}))
    yield name, made(kind, base)
    if name in DIFFERENT:
        yield DIFFERENT[name].alike, _alike(name, kind, base)
    if name == "llama":
        for scaling, values in SCALINGS.items():
            rope = {"rope_theta": 700.0, **values}
            yield f"llama-{scaling}", made(kind, changed(base, {"rope_parameters": rope}))
    if name == "phi3":  # which takes it in a form of its own
        long = dict(changes(base))["longrope"]
        del long["rope_parameters"]["factor"]  # which follows from the lengths in published ones
        yield "phi3-longrope", made(kind, changed(base, long))


def _alike(name: str, kind: Any, base: Any) -> Any:
    """A model in which the difference of its type can't show."""
    import torch

    from scripts.family_sweep import changed, made

    values = dict[str, Any]()
    if name == "mamba2":
        values = {"n_groups": 1}
    if name == "moshi":
        values = {"sliding_window": 2 * len(TOKENS)}
    if name == "gemma3n_text":  # and no layer in which the least rounding decides which few values are kept
        values = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * base.num_hidden_layers}
    if name == "recurrent_gemma":
        values = {"attention_window_size": 2 * len(TOKENS)}
    if name == "zamba2":
        values = {"chunk_size": 2 * len(TOKENS)}
    if name == "modernbert-decoder":
        rope = base.rope_parameters
        values = {"rope_parameters": dict.fromkeys(rope, rope["full_attention"])}
    model = made(kind, changed(base, values))
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if name == "apertus" and ".act_fn." in label:
                parameter.copy_(parameter.bfloat16())
            if name in ("qwen3_next", "gemma3n_text") and parameter.dim() > 1:
                parameter.mul_(0.5)
    return model


def export(model: Any, folder: Path) -> list[str]:
    """Write a model, read it, and write it again to `folder`, with its log-probs; returns the fields that changed."""
    import torch

    from proxima.model.input_files import ATTRIBUTE, open_input
    from proxima.model.load import save
    from proxima.model.parallel.slices import sliceable_files
    from tests.tiny import tiny_tokenizer

    given = folder.parent / f"{folder.name}-input"
    model.save_pretrained(given)
    tiny_tokenizer().save_pretrained(given)
    again = type(model).from_pretrained(given, dtype=torch.float32, attn_implementation="eager")
    files = open_input(again, tiny_tokenizer(), str(given), None, sliceable_files(str(given), None), scalar=False)
    setattr(again, ATTRIBUTE, files)
    save(again, tiny_tokenizer(), folder)
    ids = torch.tensor([[i % model.config.get_text_config().vocab_size for i in TOKENS]])
    # without a mask, some types of 4.57 see what follows
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        expected = again.eval()(**asked).logits.log_softmax(-1)
        exported = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        given_back = exported(**asked).logits.log_softmax(-1)
    if not torch.equal(given_back, expected):
        raise ValueError("this version reads the export as another model")
    torch.save((ids, expected), folder / "expected.pt")
    before, now = (json.loads((place / "config.json").read_text(encoding="utf-8")) for place in (given, folder))
    return sorted(_changed(before, now))


def _changed(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """The names of the fields that differ, those of the parts of a config among them."""
    names = set[str]()
    for name in before.keys() | now.keys():
        one, other = before.get(name), now.get(name)
        if name.endswith("_config") and isinstance(one, dict) and isinstance(other, dict):
            names |= _changed(one, other)
        elif one != other:
            names.add(name)
    return names


def swept(names: Sequence[str], old: Path) -> Iterator[dict[str, Any]]:
    """The verdicts of those of the types that the older version knows, a few in each process."""
    register = (old / "transformers/models/auto/configuration_auto.py").read_text(encoding="utf-8")
    known = [name for name in names if f'("{name}", ' in register]
    for first in range(0, len(known), BATCH):
        yield from _in_process(known[first : first + BATCH], old)


def _in_process(names: Sequence[str], old: Path) -> Iterator[dict[str, Any]]:
    """The verdicts of these types, from a process of their own; those that one lacks whose process ended early get
    another each."""
    command = [sys.executable, str(Path(__file__).resolve()), *names]
    rows = _rows(command, {**os.environ, OLD: str(old)})
    yield from rows
    seen = {row["name"] for row in rows}
    lacking = [name for name in names if name not in seen]
    if lacking and len(names) == 1:
        yield {"name": names[0], "changed": [], "error": "its process ended"}
        return
    for name in lacking:
        yield from _in_process([name], old)


def _rows(command: Sequence[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    ran = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment, cwd=REPOSITORY, check=False
    )
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def sweep(names: Sequence[str], old: Path) -> Iterator[dict[str, Any]]:
    """The verdicts of these types."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as place:
        yield from _batch(names, Path(place), old)


def _batch(names: Sequence[str], place: Path, old: Path) -> Iterator[dict[str, Any]]:
    rows = dict[str, dict[str, Any]]()
    for name in names:
        try:
            variants = list(models(name))
        except Exception as error:
            yield {"name": name, "built": f"{type(error).__name__}: {error}"[:200]}
            continue
        for variant, model in variants:
            try:
                rows[str(place / variant)] = {"name": variant, "changed": export(model, place / variant)}
            except Exception as error:
                yield {"name": variant, "changed": [], "error": f"{type(error).__name__}: {error}"[:200]}
    own = own_differences(old, [folder for folder, row in rows.items() if row["name"] in DIFFERENT])
    for read in read_by(old, list(rows)):
        folder = read.pop("folder")
        yield rows.pop(folder) | read | own.get(folder, {})
    for row in rows.values():
        yield {**row, "error": "the older version's process ended"}


def read_by(old: Path | None, folders: Sequence[str]) -> list[dict[str, Any]]:
    """How the older version reads folders; None: how this one does."""
    return _rows([sys.executable, "-c", READER, *folders], environment(old))


def own_differences(old: Path, folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By folder, how far both versions are apart on a model of the same config that the older one made and wrote."""
    _rows([sys.executable, "-c", MAKER, *folders], environment(old))
    reads = read_by(None, [f"{folder}-own" for folder in folders])
    return {read["folder"].removesuffix("-own"): {"own": read.get("nats")} for read in reads}


def environment(old: Path | None) -> dict[str, str]:
    """The variables of a process of the older version; None: of this one."""
    more = {"HF_HUB_OFFLINE": "1"}
    if old is not None:
        more["PYTHONPATH"] = str(old)
    return {**os.environ, **more}


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]
    from scripts.family_sweep import types

    given = sys.argv[1:]
    for row in (sweep if given else swept)(given or types(), Path(os.environ[OLD])):
        print(json.dumps(row), flush=True)
