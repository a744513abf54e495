"""A server for OpenAI's protocol on ``agentic_ring.inference``.

    python -m agentic_ring.serve --model FOLDER

Requires the extra ``serve``. One request is processed at a time; others wait in a queue.

    app.py              routes, streams, error replies
    openai_requests.py  validation of requests
    openai_replies.py   format of replies
    request_queue.py    waiting and refused requests
    generation.py       answers and log probabilities
"""
