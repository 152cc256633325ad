"""A reward model behind HTTP, in the protocol of the reward `http`.

    POST /score   a prompt with its completions → {"scores": [s, …]}

    scorer_limits     limits on the requests of clients; the command line reads them without the extra
    scorer_app        access checks, requests validated field by field, scores and responses

Imports: uvicorn and starlette (the extra `serve`), reward, model. Imported by `proxima reward serve`; the limits by
`proxima view`.
"""
