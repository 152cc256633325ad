"""`proxima serve-training`: the trainer and the engine of proxima, for programs written for the Tinker SDK.

    serve_training.py   the command                    service_app.py   routes, access, limits
    served_settings.py  its options                    request_log.py   what must survive the process
    service.py          sessions, models, samplers, and the requests of each model in their order
    workers.py          threads that serve all models in turn
    trained_model.py    a model being trained: an adapter on the common base, gradients, optimizer, its state
    datum.py            an example of a client, and the response as which it is packed
    losses.py           the losses by their names in the SDK, and those of `proxima.core`
    samplers.py         engines with the weights of a model at some moment
    wire.py             protocol buffers of the SDK
    folder_checksums.py checksums of what a client saved
    served_record.py    what `proxima view` reads

Imports: tinker (its messages only), starlette, torch; `proxima.model`, `core`, `engine`, `reward.server`, `system`.
"""

__version__ = "0.1.0"
