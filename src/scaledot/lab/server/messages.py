"""Messages of a socket: JSON objects of limited size, or a refusal in words."""

from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from scaledot.lab.server.plain_json import parsed

LARGEST = 64 * 1024  # bytes; a question has a few hundred
TOO_BIG = 1009  # the WebSocket protocol's code


async def receive(socket: WebSocket) -> dict[str, Any]:
    """The next message. ValueError: it is none of ours; WebSocketDisconnect: there is no more."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    text = message.get("text")
    if text is None:
        raise ValueError("the message is binary; expected JSON text")
    if len(text) > LARGEST:  # the server's own limit comes first; this one stands alone
        await socket.close(TOO_BIG, f"messages have at most {LARGEST} bytes")
        raise WebSocketDisconnect(TOO_BIG)
    return parsed(text)
