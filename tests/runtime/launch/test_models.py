"""How models beside the policy lie on its ranks."""

import pytest

from proxima.model.parallel.sharding import Sharding
from proxima.runtime.launch.models import sharding_beside
from tests.model.families import FAMILIES


@pytest.mark.parametrize(("family", "expected"), [("Llama", 1), ("Qwen3-MoE", 2), ("Mixtral", 2)])
def test_a_teacher_or_critic_without_experts_has_none_to_split(family, expected, tmp_path):
    FAMILIES[family][1].save_pretrained(tmp_path)
    given = Sharding(expert_parallel=2, context_parallel=2)
    found = sharding_beside(given, str(tmp_path))
    assert found is not None and (found.expert_parallel, found.context_parallel) == (expected, 2)
    assert sharding_beside(None, str(tmp_path)) is None
