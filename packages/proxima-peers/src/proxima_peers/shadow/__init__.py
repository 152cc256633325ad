"""Shadow: one update step that another trainer has dumped, computed here, with the convention behind each number.

    dump       what the trainer wrote: arrays and settings       shadow_settings  what its user believes it computes
    choices    a convention, and what a search has found         advantage_choices, weight_choices, loss_choices,
    stages     rewards → … → gradient, each with a verdict       aggregate_choices, metric_choices   the tables
    loss_terms the terms of the loss under each convention   token_advantage_choices  a critic's, and KL in the reward

Each stage takes the trainer's own numbers of the stages before it, so that one disagreement does not become six. The
mathematics is `proxima.core`; a convention is one of its specs, or what a peer does with its result. All of a table is
tried, and everything that fits is named: what can't be told apart on this batch is said to be so.
Imports: torch, numpy, safetensors, `proxima.core`, `proxima.config`, `proxima_peers.verify`. Imported by `proxima peers
shadow`.
To add a convention: a line in one of the tables, and its rewriting in `tests/shadow/rewriting.py`.
"""
