"""Models: a Hugging Face causal LM becomes a `Policy`: packed trajectories in, log-probs (and entropies) of the
response tokens out.

`load.py` loads, `attention.py` keeps packed sequences apart, `log_prob.py` is the fused head, `policy.py` combines
them, `save.py` writes a folder that `AutoModelForCausalLM` loads, `compute_thread.py` is where all of it runs,
`demo_model.py` downloads a small model.
Imports: torch, transformers, `proxima.data`, `proxima.core`. Imported by `engine` (decoders), `train`, `runtime`,
`cli`.
To add an attention path: a function in `attention.py` and a line in `ATTENTION`; the contamination tests find it there.
"""

from proxima.model.load import LoadedModel, load
from proxima.model.log_prob import token_log_prob
from proxima.model.policy import Policy, TokenOutputs
from proxima.model.save import save

__all__ = ["LoadedModel", "Policy", "TokenOutputs", "load", "save", "token_log_prob"]
