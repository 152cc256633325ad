"""A reward model behind HTTP, in the protocol of the reward `http`.

    POST /score   a prompt with its completions → {"scores": [s, …]}
    POST /batch   {"requests": [a request of /score, …]} → {"results": [a response of /score, …]}

If the request has `"per_token": true`, each score also has `tokens`, the score after each token of the completion.

    score_requests    the JSON of a request, validated field by field
    scorer_limits     limits on the requests of clients
    fair_queue        slices of each request in turn, on the compute thread
    scorer_app        access checks and responses
    scorer_listener   uvicorn: the socket, the shutdown
    bounded_connections  the deadlines and the number of connections, also for `proxima view`

Imports: uvicorn and starlette (the extra `serve`), reward, model. Imported by `proxima serve-reward`; the limits and
`bounded_connections` by `proxima view`.
"""
