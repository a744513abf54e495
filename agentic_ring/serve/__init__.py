"""A small server that speaks OpenAI's protocol, on ``agentic_ring.inference``.

    python -m agentic_ring.serve --model FOLDER

Needs the extra ``serve``. One request is worked on at a time; others wait their turn.

    protocol.py       what a request may hold
    app.py            addresses, errors, replies, streams
    body_limit.py     requests that are too large
    turns.py          who waits, and who is sent away
    writer.py         prompts to answers and their log probabilities
    scored_tokens.py  tokens as text, with log probabilities
"""
