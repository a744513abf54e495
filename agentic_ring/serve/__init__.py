"""A server for OpenAI's protocol on ``agentic_ring.inference``.

    python -m agentic_ring.serve --model FOLDER

Requires the extra ``serve``. Requests that continue the same long text are answered together; others wait.

    app.py              routes, streams, error replies
    openai_requests.py  validation of requests
    openai_replies.py   format of replies
    json_body.py        strict JSON
    http_limits.py      limits on connections, slow and large requests
    request_queue.py    waiting and refused requests
    request_batch.py    which requests are answered together
    jobs.py             what a request asks, and who asks
    prompts.py          chat templates and tokens of prompts, and their limits
    prompt_process.py   the process that does this
    remembering_tokenizer.py  texts that begin alike are encoded once
    generation.py       answers and log probabilities
    metrics.py          metrics in Prometheus' format
"""
