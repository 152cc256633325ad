"""prime-rl's choice of questions: the curricula of its environments, and the buffer of spring 2026.

a gate of type advantage_range, online_difficulty_filtering    drop_uniform_groups with dynamic_sampling
a sampler of type difficulty_pool, easy_ and hard_threshold    question_pool
"""

from collections.abc import Mapping
from typing import Any

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.options import Options
from proxima_peers.convert.prime_rl_sources import BATCH, Source, listed, name_of, option_of_sources

BUFFER = f"{BATCH}buffer."
THRESHOLDS = (f"{BUFFER}easy_threshold", f"{BUFFER}hard_threshold")
FILTERED = f"{BUFFER}online_difficulty_filtering"
POOLS = {"hard": {"weight": 0.2}, "normal": {"weight": 1.0}, "easy": {"weight": 0.2}}  # theirs where none are written
POOL = "algorithm.question_pool"
UNWEIGHTED = (
    "There a question's pool follows its last mean reward, and draws are not weighed; here it follows how often its "
    "groups were uniform, and their advantages are weighed by 1 / p"
)


def curricula(d: Draft, o: Options) -> None:
    """What decides which questions are asked, and which groups train. It follows what the selection holds already."""
    _of_sources(d, o)
    if o.flag(FILTERED):
        _replace_uniform(d, o.origin(FILTERED), "It replaces groups of mean reward 0 or 1.")
    elif o.given(FILTERED):
        d.drops(FILTERED, "off, or neutral")
    given = [name for name in THRESHOLDS if o.given(name)]
    for name in given:
        d.lacks(name, f"{shown(o.get(name))}: such a question is not asked again there; {POOL} asks it less often")
    if given:
        _pool(d, given[0], (0.2, "our default"), UNWEIGHTED)


def _of_sources(d: Draft, o: Options) -> None:
    """The curriculum that all environments have; one of some environments only is told."""
    sources = listed(o)
    option = option_of_sources(o)
    of_run, of_some = _shared([_parts(source) for source in sources])
    for index, part in of_some:
        here = "here all environments of a run have the same, or none"
        d.lacks(option, f"curriculum {shown(part)} of {name_of(sources[index])}: {here}")
    for part in of_run:
        kind = part.get("type")
        if kind == "advantage_range" and not part.get("reject_min") and not part.get("reject_max"):
            _replace_uniform(d, f"from {option}", "Its gate replaces groups of equal rewards.")
        elif kind == "difficulty_pool":
            _difficulty_pool(d, part, option)
        elif kind != "standard":
            d.lacks(option, f"curriculum {shown(part)}: no group is chosen by that here")


def _parts(source: Source) -> list[Mapping[str, Any]]:
    """The gates of an environment, and then its sampler, which follows what the gates reject."""
    curriculum = source.get("curriculum")
    if not isinstance(curriculum, Mapping):
        return []
    gates = curriculum.get("gates")
    found: list[Any] = []
    if isinstance(gates, Mapping):
        found += gates.values()
    found.append(curriculum.get("sampler"))
    found += [{key: value} for key, value in curriculum.items() if key not in ("sampler", "gates")]
    return [part for part in found if isinstance(part, Mapping)]


Parts = list[Mapping[str, Any]]


def _shared(parts: list[Parts]) -> tuple[Parts, list[tuple[int, Mapping[str, Any]]]]:
    """The parts that all environments have, and those of some with the index of the environment."""
    of_run: Parts = []
    of_some = []
    for index, own in enumerate(parts):
        for part in own:
            if not all(part in other for other in parts):
                of_some.append((index, part))
            elif part not in of_run:
                of_run.append(part)
    return of_run, of_some


def _replace_uniform(d: Draft, origin: str, note: str) -> None:
    """Groups of equal rewards are dropped, and others are generated for them."""
    kinds = [entry.value for path, entry in d.entries.items() if path.startswith("algorithm.selection.")]
    if "drop_uniform_groups" not in kinds:
        d.append("algorithm.selection", "drop_uniform_groups", origin, note)
    d.put("algorithm.dynamic_sampling.max_num_gen_batches", 0, origin, "no limit, as there")


def _difficulty_pool(d: Draft, sampler: Mapping[str, Any], option: str) -> None:
    """The pools of a sampler: the ratio of the smallest weight to the largest is the least probability of a draw."""
    pools = sampler.get("pools", POOLS)
    written = []
    if pools:
        written = [pool.get("weight") for pool in pools.values() if isinstance(pool, Mapping)]
    weights = [weight for weight in written if isinstance(weight, int | float) and weight >= 0]
    least = 0.0
    if weights and max(weights) > 0:
        least = min(weights) / max(weights)
    where = f"from {option}: the smallest weight of its pools, over the largest"
    if least == 0:
        d.lacks(option, f"{shown(pools)}: questions of weight 0 are not asked there; here p is > 0")
    share = (least, where) if least else (0.2, "our default")
    _pool(d, option, share, UNWEIGHTED)


def _pool(d: Draft, option: str, least: tuple[float, str], note: str) -> None:
    """`question_pool`, unless the loss has a part that does not scale with the advantages, which it weighs."""
    penalties = [path for path in d.entries if path.startswith("algorithm.penalty.")]
    kinds = [entry.value for path, entry in d.entries.items() if path.startswith("algorithm.selection.")]
    if penalties:
        d.lacks(
            option, f"a pool of questions: {POOL} weighs advantages, and algorithm.penalty does not scale with them"
        )
    elif "drop_uniform_groups" not in kinds:
        d.lacks(option, f"a pool of questions: {POOL} follows the groups that drop_uniform_groups drops")
    else:
        d.put(f"{POOL}.least", *least, f"{note}.")
