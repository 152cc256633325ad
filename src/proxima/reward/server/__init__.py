"""A reward model behind HTTP, in the protocol of the reward `http`.

    POST /score   a prompt with its completions → {"scores": [s, …]}

    scorer_limits     limits on the requests of clients; the command line reads them without the extra
    scorer_app        access checks, requests validated field by field, scores and responses
    bounded_server    uvicorn with bounds on its connections, also for `proxima view` and the endpoint for agents;
                      a reader of bodies with bounds

Imports: uvicorn and starlette (the extra `serve`), reward, model. Imported by `proxima reward serve`; the limits and
`bounded_server` by `proxima view`, and the latter by the endpoint for agents and by proxima-tinker.
"""
