"""A quarter of an hour on a GPU: what to measure first where one is at hand for minutes, without a network.

    schedule    the parts in their order, and the one limit for all: each ends by its share of it
    record      a line for each figure, written at once beside its prediction; the exit code
    forecast    the predictions: the plan's arithmetic, for this device
    sizes       shapes of published models, with weights that are drawn on the device, and the update
    kernels     (1 minute, no model) products, attention, the output head, grouped products
    updates     (5) updates of Qwen3-1.7B and 4B
    one_rank    (2) the sharded path over NCCL with a world of one
    weights     (2) weights of 4B to a second process; whole syncs by part, to that of `stand_in`
    decode      (3) decoding with 4B
    resumed     (if time is left) 20 steps of 1.7B, killed and resumed
    run         the command

To add a figure: `record.figure` in a part. To add a part: a module with a `main`, and a line in `schedule.PARTS`.
"""
