"""Requests that are too large are refused as soon as they are seen to be."""

from dataclasses import dataclass

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class BodyLimit:
    """Reads no more of a body than ``most`` bytes; an error of the application's own form says so.

    FastAPI's own limit answers in plain text, which clients of this protocol cannot read.
    """

    app: ASGIApp
    most: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.most:
                raise HTTPException(413, f"the request is larger than {self.most} bytes")
            return message

        await self.app(scope, limited, send)
