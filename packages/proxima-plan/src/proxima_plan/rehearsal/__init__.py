"""Rehearsals: whole training steps on a fake accelerator, without weights and without a device.

fake_device    a device of torch without memory, that autocast and attention treat as they treat a CUDA device
device_watch   counts the bytes that are alive on it, and the waits for it
fake_training  model, stages, objective and stack of a config on that device, and items of its sizes
fake_ranks     rank 0 of a group whose other ranks do not exist
rehearsal      `rehearse_recipe`, in a process of its own, because a fake device changes it for good

Imports: `memory` for the names of kinds, and every room of proxima. Imported by `answers`. To add an operation that
reads the device: an answer to it in `device_watch`.
"""
