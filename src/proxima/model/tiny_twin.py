"""A twin of a model: the same class and structure with few and narrow layers and random weights, made in milliseconds.

What goes wrong between a model and whoever takes it apart is its structure, not its weights: a scale after the head, a
window, a mask of its own. A twin shows it in float32, whatever the size, dtype and device of the model, before its
weights are loaded or when they are on other ranks; and where windows are longer than a text, the twin's are not.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from proxima.data import UserError
from proxima.model.faults import is_ours
from proxima.model.positions import fix_positions
from proxima.model.pretrained import without_progress_bars

FIRST_ID = 3  # ids below it are special in many vocabularies
VOCABULARY = 96
DEPTH = 4  # layers, if they are of at most so many kinds
WINDOW = 4  # tokens
DROPPED = ("transformers_version", "dtype", "torch_dtype", "quantization_config")
# factor of the width, heads, and size of a head, of state-space layers
STATE_SPACES = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
)
NOT_WIDTHS = 10  # of the following that are no widths
# the largest value of a field of a config in the twin, by the first pattern that its whole name matches
LARGEST: tuple[tuple[str, int], ...] = (
    (r".*(dropout|_token_id|_token_index|_id|_idx|_index|_prob|seed)", 1 << 62),
    (r".*vocab_size.*|.*vocabulary_size", VOCABULARY),
    (r"ngram_vocab_size_base", 32),
    (r"(sliding|attention|local|keep|window|conv_)?_?(attention_)?window(_size|_len)?", WINDOW),
    (r".*window.*|attention_chunk_size|local_attention|index_topk|rel_extent|floor_scale|log_scaling_n_floor", WINDOW),
    (r".*chunk_(size|length)|index_block_size|block_size", 8),
    (r"index_topk_blocks|.*_chunk_length", 2),
    (r"(num|n|encoder|decoder|attention)(_hidden|_encoder|_decoder)?_?(layers|layer|blocks)(_per_stack)?", DEPTH),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_nextn_predict_layers|num_mtp_layers", 0),
    (r".*(period|interval|pattern|every_n_layers|_step|group_size)", 2),
    (r".*(_offset)", 1),
    (r"num_kv_shared_layers|n_layers_per_attn_res_block", 1),
    (r".*experts_per_tok(en)?|moe_(k|topk)|top_?k", 2),
    (r"topk_group", 1),
    (r"n_group|num_expert_group|o_groups|n_groups|.*n(um)?_?groups", 2),
    (r".*shared_experts", 1),
    (r".*experts|zero_expert_num", 4),
    (r".*(num_key_value_heads|num_kv_heads|linear_num_key_heads|num_query_groups)", 2),
    (r".*heads|n_head|num_attention_heads_per_layer", 4),
    (r"swa_num_.*|.*index_n_heads", 4),
    (r"qk_(nope|rope)_head_dim|v_head_dim|linear_.*head_dim|mamba_(d_head|head_dim|headdim)|.*index_head_dim", 8),
    (r".*head_dim|dim_head|d_head|kv_channels|attention_head_size", 16),
    (r"rotary_dim", 8),
    (r".*lora_rank|.*_rank|hc_lowrank|d_rel", 8),
    (r".*(state_size|d_state)", 8),
    (r"attention_hidden_size|mamba_d_ssm", 128),
    (r".*_per_layer(_input)?|ple_embed_dim", 16),
    (r".*(hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|lru_width|_proj_dim|dim_model_base)", 64),
    (r".*(intermediate_size|intermediate_size_mlp|ffn_dim|dim_ff|dff|d_inner|n_inner|feed_forward_size)", 48),
)
POSITIONS = re.compile(
    r"(max|n)_.*(position|length|positions|ctx|seq_len).*|n_ctx|n_positions|context_length|model_max_length"
)
IDS = re.compile(r"(bos|eos|pad|sep|cls|mask|decoder_start|unk)_(token_id|index)")
SMALL = 1 << 28  # parameters of a twin whose widths can't be reduced


def make_twin(kind: type[nn.Module], config: Any, longest: int | None = None) -> Any:
    """A model of class `kind` with a config like `config`, in float32 on the CPU, in eval mode, and the position
    factors of sequences of `longest` tokens, where they depend on that. Its weights are drawn wide, norms, biases and
    buffers beside the decoder too, so that a forgotten one shows. The global RNG is left as it was.

    Raises:
        UserError: neither a narrow one nor one with few layers can be made.
    """
    with without_progress_bars():  # its advice on a config that nobody wrote
        return _twin(kind, config, longest)


def _twin(kind: Any, of: Any, longest: int | None) -> Any:
    reasons: list[str] = []
    for narrow in (True, False):
        try:
            config = tiny_config(of, narrow=narrow)
            if not narrow:
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in kind(config).parameters())
                if size > SMALL:
                    reasons.append(f"{size:,} parameters in {DEPTH} layers")
                    continue
            twin = _drawn(kind, config)
            if longest is not None:
                fix_positions(twin, longest, longest)
            with torch.no_grad():
                twin(input_ids=torch.tensor([[FIRST_ID, FIRST_ID + 1]]), use_cache=False)
            return twin
        except Exception as error:  # of any kind, from the code of the model
            if is_ours(error, kind):
                raise
            reasons.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")
    raise UserError(f"{kind.__name__} is not supported: no small copy of it can be made to prove it on ({reasons[0]})")


def _drawn(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        twin = kind(config).float().eval()
        decoder = {id(buffer) for buffer in twin.base_model.buffers()}
        tensors = list(twin.parameters())
        tensors += [buffer for buffer in twin.buffers() if id(buffer) not in decoder]
        for tensor in tensors:
            if tensor.is_floating_point():
                spread = 0.05
                if tensor.dim() > 1:
                    spread = 1.2 / math.sqrt(max(tensor.shape[-1], 16))
                tensor += spread * torch.randn(tensor.shape)
    return twin


def tiny_config(config: Any, *, narrow: bool = True) -> Any:
    """A config of the same class, with every size reduced to a few units where its field is recognised; without
    `narrow` the number of layers, windows and vocabulary alone.

    Raises:
        Exception: of the class, for fields that do not fit each other.
    """
    small = type(config)(**_shrunk(config.to_dict(), config, narrow))
    small._attn_implementation = None
    return small


def _shrunk(fields: dict[str, Any], config: Any, narrow: bool) -> dict[str, Any]:
    names: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
    depth_name = names.get("num_hidden_layers", "num_hidden_layers")
    fields = {name: value for name, value in fields.items() if name not in DROPPED}
    depth = fields.get(depth_name)
    layers = _representative(fields, depth) if isinstance(depth, int) else []
    small: dict[str, Any] = {}
    rows = fields.get(names.get("vocab_size", "vocab_size"))
    vocabulary = VOCABULARY
    if isinstance(rows, int) and rows > 0:
        vocabulary = min(rows, vocabulary)
    for name, value in fields.items():
        part = vars(config).get(name)
        if name == "per_layer_config" and value:
            small[name] = {}
            for i, each in value.items():
                if int(i) in layers:
                    small[name][layers.index(int(i))] = {key: _reduced(key, x, narrow) for key, x in each.items()}
        elif isinstance(value, dict) and hasattr(part, "to_dict"):
            small[name] = _shrunk(value, part, narrow)
        elif isinstance(value, list) and layers and len(value) == depth:
            small[name] = [_reduced(name, value[i], narrow) for i in layers]
        elif isinstance(value, list) and layers and _names_layers(name, value, depth):
            small[name] = [layers.index(i) for i in value if i in layers]
        else:
            small[name] = _reduced(name, value, narrow, vocabulary)
    if layers:
        small[depth_name] = len(layers)
    if narrow:
        _fit_each_other(fields, small)
    return small


def _names_layers(name: str, values: list[Any], depth: Any) -> bool:
    """True for a field that lists layers by their numbers."""
    if not values or not name.endswith(("layers", "_ids", "idxs")):
        return False
    return all(type(i) is int and 0 <= i < depth for i in values)


def _representative(fields: Mapping[str, Any], depth: int) -> list[int]:
    """The layers to keep: the first of each kind by all lists that have an entry for each layer, and others up to
    `DEPTH`."""
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == depth]
    own: Mapping[Any, Any] = fields.get("per_layer_config") or {}
    settings = {int(i): each for i, each in own.items()}
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([[column[i] for column in lists], settings.get(i)]), i)
    first_of_kinds = list(kinds.values())[: 2 * DEPTH]
    return sorted({*first_of_kinds, *range(min(DEPTH, depth))})


def _reduced(name: str, value: Any, narrow: bool, vocabulary: int = VOCABULARY) -> Any:
    if IDS.fullmatch(name):
        if isinstance(value, list):
            return [_reduced_id(each, vocabulary) for each in value]
        return _reduced_id(value, vocabulary)
    if type(value) is not int or value <= 1:
        return value
    if POSITIONS.fullmatch(name):
        return min(max(value, 32), 128)
    table = LARGEST if narrow else LARGEST[:NOT_WIDTHS]
    for pattern, most in table:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value


def _reduced_id(value: Any, vocabulary: int) -> Any:
    return value % vocabulary if isinstance(value, int) and value >= 0 else value


def _fit_each_other(fields: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Restore the relations between the sizes of a config that others are made of."""
    if small.get("qk_rope_head_dim"):
        for name in ("head_dim", "qk_head_dim"):
            of = ["qk_rope_head_dim"]
            if fields.get(name) != fields["qk_rope_head_dim"]:
                of.append("qk_nope_head_dim")
            if small.get(name):
                small[name] = sum(small.get(part) or 0 for part in of)
    width = small.get("hidden_size")
    if _heads_divide_width(fields) and not _heads_divide_width(small):
        small["num_attention_heads"] = 2  # of three; a class may refuse what does not divide
    for name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"):
        heads = name.replace("key_value_", "attention_").replace("kv_", "attention_")
        if name in small and fields[name] == fields.get(heads):
            small[name] = small[heads]
    for expand, heads, dim in STATE_SPACES:
        if width and small.get(expand) and small.get(heads) and small.get(dim) and fields.get(expand) != heads:
            inner = small.get("mamba_d_ssm") or small[expand] * width
            small[heads] = max(1, inner // small[dim])
    dims: list[Any] = [fields.get("head_dim"), small.get("head_dim")]
    if not all(isinstance(x, int) for x in dims):
        dims = [_width_of_a_head(fields), _width_of_a_head(small)]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _turns(small[name], dims[1] / dims[0])


def _heads_divide_width(fields: Mapping[str, Any]) -> bool:
    heads = fields.get("num_attention_heads")
    width = fields.get("hidden_size")
    return isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads == 0


def _width_of_a_head(fields: Mapping[str, Any]) -> int:
    """By the width and the heads of a config; 1 without them."""
    width = fields.get("hidden_size")
    heads = fields.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads:
        return width // heads
    return 1


def _turns(rope: dict[str, Any], ratio: float) -> dict[str, Any]:
    """Position factors for heads that are narrower by `ratio`."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _turns(value, ratio)
        elif name in ("short_factor", "long_factor"):
            small[name] = value[: max(1, round(len(value) * ratio))]
        elif name == "mrope_section":
            small[name] = [max(1, round(count * ratio)) for count in value]
        else:
            small[name] = value
    return small
