"""Models: a Hugging Face causal LM becomes a `Policy`: packed trajectories in, log-probs (and entropies) of the
response tokens out. With a scalar head it becomes a `ScalarModel`: values out.

    model_source   `ModelSource`: a model by its name, how it is loaded and run
    load           loads a causal LM, and saves it          demo_model     downloads a small one
    input_files    what it was read from, kept open         written_settings  a folder's files but the weights
    pretrained     config and tokenizer of a path           files          its files, the hub, hashes, checks
    architecture   decoder, head and class of a model       positions      its longest sequence, fixed position factors
    proof          proves at load that a model can be run so, on the small copy that `tiny_twin` makes

    policy         log-probs                                scalar_model   reward models and critics
    packed_model   what both share: batches, hidden states  micro_batch    splits an update by a token budget
    attention      keeps packed sequences apart             moe            experts of each token, recorded and replayed
    log_prob       from hidden states to log-probs          masked_logits  sums over a sampling mask
    fused          both in C++, for models that it recognises
    compute_thread the thread that runs all of it

    adapters/      LoRA: on a model, and its files          chat/          messages as tokens, templates
    images/        the images of a run, as tokens and input  parallel/     a model sharded over many ranks

Imports: torch, transformers, `proxima.data`, `proxima.core`. Imported by `engine` (decoders), `training`, `runtime`,
`cli`.
To add an attention path: a function and a line of `ATTENTION` in `attention.py`; the contamination tests find it there.
"""
