"""The APIs in which an agent asks the policy: `chat` is what all of them mean, each other file one of them.

A format parses the JSON of a request into a `ChatRequest`, and writes the answer as JSON and as the events of a stream.
A stream is made of the complete answer, so both say the same. `fields` has the rule that no field is silently ignored.

To add one: a file with the methods of `chat.ApiFormat`, and its line in `endpoint.FORMATS`. Imports: `data` and
`environment`; imported by the endpoint and the player of agents."""
