"""A server for OpenAI's protocol on ``agentic_ring.inference``; requires the extra ``serve``.

    python -m agentic_ring.serve --model FOLDER

Requests that continue the same long text are answered together; others wait.
"""
