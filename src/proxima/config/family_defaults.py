"""Values that the recipes of a family have where they set none."""

from proxima.config.describe import table_of
from proxima.config.families import Family
from proxima.config.tree import DEFAULT, Node, Source, merge, node_of


def with_learning_rate(tree: Node, family: Family) -> Node:
    """Set the family's default learning rate, if it has one, the optimizer is one of proxima's, and the recipe sets no
    rate."""
    rate = family.learning_rate
    train = (tree.mapping or {}).get("train", Node({}, DEFAULT))
    if rate is None or train.mapping is None:
        return tree
    optimizer = train.mapping.get("optimizer", Node({}, DEFAULT))
    kinds = (None, *table_of("proxima.training:OPTIMIZERS"))
    if optimizer.mapping is None or "lr" in optimizer.mapping or optimizer.at("kind") not in kinds:
        return tree
    source = Source(f"default of {family.name} recipes", "default")
    return merge(tree, node_of({"train": {"optimizer": {"lr": rate}}}, source))
