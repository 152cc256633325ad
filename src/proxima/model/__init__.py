"""Models: a Hugging Face causal LM becomes a `Policy`: packed trajectories in, log-probs (and entropies) of the
response tokens out. With a scalar head it becomes a `ScalarModel`: values out.

`load.py` loads, `second_model.py` reads a model beside the policy, `attention.py` keeps packed sequences apart,
`images.py` numbers the images of a run, whose files `image_folder.py` has, `proof.py` proves at load that a model can
be run so, on the small copy that `tiny_twin.py` makes, `positions.py` fixes position factors, `model_parts.py` takes a
model apart, `fused_backbone.py` and `fused_log_prob.py` compute in C++ what `plain_decoder.py` recognises,
`packed_model.py` has what both models share, `log_prob.py` is the head of `policy.py`, by `fused_log_prob.py` or else
`blockwise_log_prob.py`, `distribution_figures.py` has its passes without gradient, `scalar_model.py` loads and runs
reward models and critics, `save.py` writes a folder that `AutoModelForCausalLM` or `AutoModelForSequenceClassification`
loads, `lora.py` defines adapters, `lora_layers.py` puts them on a model, `adapter_files.py` reads and writes them,
`adapter_folder.py` tells which base they belong to, `grouped_experts.py` has the common interface of mixture layers,
`files.py` hashes a model's files, `compute_thread.py` is the thread that runs all of it, `chat.py` turns messages into
tokens, `chat_answer.py` written answers, `template_variables.py` tells what a template reads, `micro_batch.py` splits
by token budget, `routing.py` records and replays the experts of mixtures, `demo_model.py` downloads a small model,
`parallel/` shards a model over many ranks.
Imports: torch, transformers, `proxima.data`, `proxima.core`. Imported by `engine` (decoders), `train`, `runtime`,
`cli`.
To add an attention path: a function in `other_attention.py` and a line in `ATTENTION`; the contamination tests find it
there.
"""
