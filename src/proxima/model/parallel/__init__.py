"""A model on many ranks: FSDP2 around the plain Hugging Face model, by small functions. The rest of `proxima.model`
sees the same modules; importing this package does not import torch.distributed.

    sharding  `Sharding`, the settings; `is_sharded(module)`; a weight's part on this rank
    mesh      `rank_device(device)`; `meshes_of(sharding, device)`, once a process; collectives with a backward pass
    shard     `shard_model`, `shard_head`: the units of FSDP; the forward method through which weights are read;
              `require_splittable`, `check_split`: what can't be split, found before weights are loaded
    experts   `shard_experts`: a layer's experts split over ranks
    tensor    `split_tensors`: matrices, experts and vocabulary over neighbouring ranks; `VocabularyPart`: log-probs
              over a head of which each rank has some rows
    slices    `load_sliced`: each rank reads its own slices; the location of each weight in the files
    context   `ContextGroup`: ranks that split the tokens of a batch
    gather    `whole_tensor`, `gather_into`, `plain_copy`: whole again, for engines and files; `total_norm`,
              `clip_gradients`
    layer_lender  `LayerLender`: whole again for servers, a layer at a time
    lending   `lent(module)`, for readers of weights, which need not know whether a lender gathers them

A trainer on many ranks calls, after `torch.distributed.init_process_group` (C: collective, every rank in the same
order):

    C  ModelSource(..., sharding=Sharding()).load(), .load_scalar(): a `LoadedModel` with `sharding` and `device` set
       .policy(loaded, value_head), .scalar(loaded)         a plain value head is sharded with the model
    C  model(batch, needs), .values(batch), top_tokens(model, ...)   as usual, the same number of times on every rank
    C  model.idle_pass(needs, backward=...)       in place of such a call, and of its backward pass, on an idle rank
       model.sync_gradients(on)                   off for all but the last micro-batch of an update
    C  total_norm(tensors), then clip_gradients(parameters, bound, norm)
    C  gather_into(loaded.model, plain or None), plain_copy(loaded)
    C  on rank 0 `with lent(LayerLender(...).module)`, on the others LayerGathering(...).follow()
    C  proxima.training.sharded_checkpoint.ShardedWriter(), its write(...) and finish()
       proxima.training.checkpoint.restore(checkpoint, stack, others)   on every rank, whoever wrote it

Gradients are sums over ranks; an optimizer built over `model.named_parameters()` steps on each rank's slices.
Imports: torch.distributed, safetensors, `proxima.data`, `model`. Imported by `model`, `training` and `runtime`, lazily.
"""
