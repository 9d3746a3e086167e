"""Files are sent compressed to whoever can unpack them."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from scaledot.lab.server.page import PageFile

LEAST = 600  # bytes; below it the headers weigh more than what is saved


def respond(request: Request, file: PageFile) -> Response:
    if len(file.content) < LEAST:
        return Response(file.content, media_type=file.type)
    headers = {"vary": "accept-encoding"}
    if not takes_gzip(request.headers):
        return Response(file.content, media_type=file.type, headers=headers)
    return Response(
        file.gzip, media_type=file.type, headers={**headers, "content-encoding": "gzip"}
    )


def takes_gzip(headers: Headers) -> bool:
    """Does Accept-Encoding name gzip, or anything at all, and not with a quality of zero?"""
    wishes = {}
    for wish in ",".join(headers.getlist("accept-encoding")).lower().split(","):
        name, _, quality = wish.replace(" ", "").partition(";")
        wishes[name] = quality.removeprefix("q=") or "1"
    wanted = wishes.get("gzip", wishes.get("*", "0"))
    return wanted.strip("0.") != ""  # "0", "0.0" and "0.000" are all zero
