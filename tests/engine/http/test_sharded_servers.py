"""The weights of a sharded model reach two servers with two tensor-parallel workers each, behind the real worker
module: over a gloo group of trainer and workers, and by a handle of each rank for its own worker."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from proxima.model.load import save
from tests.engine.http.sharded_servers import same_parts
from tests.model.families import DENSE
from tests.model.parallel.ranks import run_ranks
from tests.tiny import drawn, tiny_tokenizer

# 259 rows of the vocabulary, 3 heads of 10 for each worker, which share one key head, and 25 rows of the MLP
ODD: dict[str, Any] = DENSE | {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 1}
ODD |= {"intermediate_size": 50, "vocab_size": 259, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_every_worker_gets_its_part_to_the_bit(tied: bool, tmp_path: Path) -> None:
    config = hf.Qwen2Config(**ODD, tie_word_embeddings=tied)
    save(drawn(hf.Qwen2ForCausalLM, deepcopy(config), 3), tiny_tokenizer(), tmp_path)
    run_ranks(same_parts, 2, tmp_path, {}, ODD["num_key_value_heads"])
