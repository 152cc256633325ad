"""The tables of options without an equivalent."""

import fnmatch
from pathlib import Path

import pytest
import yaml

from proxima_peers.convert import PEERS
from proxima_peers.convert.known import option_rules

from .conftest import EXAMPLES, names

TABLES = {peer: EXAMPLES.parents[1] / "src/proxima_peers/convert/options" / f"{peer}.yaml" for peer in PEERS}


@pytest.mark.parametrize("peer", PEERS)
def test_a_table_names_each_option_once_in_a_section(peer):
    class Loader(yaml.SafeLoader):
        """Refuses a key that is written twice, which YAML would swallow."""

    def mapping(loader, node, deep=False):
        keys = [loader.construct_object(key, deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (node.start_mark, sorted(keys))
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    assert set(yaml.load(TABLES[peer].read_text(), Loader)) <= {
        "training",
        "no effect",
        "changes",
        "waits",
        "part of",
        "copies",
        "to fill in",
    }


HARMLESS = (
    "profiler",
    "_target_",
    "transfer_queue",
    "npu_profile",
    "nsight_options",
    "actor.profile.",
    "critic.profile.",
    "name_remap.",
)


@pytest.mark.parametrize("peer", PEERS)
def test_no_pattern_without_effect_can_hide_a_misspelling(peer):
    table = option_rules(peer)
    assert len(table) > 60
    patterns = [name for name, rule in table.items() if rule.effect == "no effect" and "*" in name]
    assert [name for name in patterns if not any(part in name for part in HARMLESS)] == []


TABLE = yaml.load(Path(__file__).with_name("changing.yaml").read_text(), yaml.CSafeLoader)
BASE = TABLE["base"]


@pytest.mark.parametrize(
    ("peer", "option", "value"),
    [(peer, *pair) for peer, options in TABLE["changing"].items() for pair in options.items()],
)
def test_what_changes_numbers_is_never_without_effect(converted, peer, option, value):
    done = converted(peer, BASE[peer] | {option: value})
    near = {name for name in names(done.ignored) if fnmatch.fnmatchcase(name, f"{option}*")}
    assert near == set()
    listed = names(done.unsupported) | names(done.missing)
    assert any(name.startswith(option) for name in listed) or f"from {option}" in done.text
