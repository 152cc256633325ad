"""A folder of one node on the others, on real processes."""

from tests.model.parallel.ranks import run_ranks
from tests.train.folder_nodes import versions_on_nodes


def test_a_folder_comes_to_each_node_once_and_whole(tmp_path):
    run_ranks(versions_on_nodes, 5, tmp_path)
