"""A reward model behind HTTP, in the protocol of the reward `http`.

    POST /score   a prompt with its completions → {"scores": [s, …]}
    POST /batch   {"requests": [what /score takes, …]} → {"results": [what /score answers, …]}

With `"per_token": true` beside the prompt each score also has `tokens`, the score after each token of the completion.

    score_requests    the JSON of a request, validated field by field
    scorer_limits     what a client may ask for
    fair_queue        slices of each request in turn, on the compute thread
    scorer_app        who may ask, and the answers
    scorer_listener   uvicorn: the socket, deadlines of a connection, the end

Imports: uvicorn and starlette (the extra `serve`), reward, model. Imported by `proxima serve-reward` alone.
"""
