"""The routes of the lab."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from scaledot.lab import catalogue, flashcards
from scaledot.lab.server import answers
from scaledot.lab.server.ask import ask
from scaledot.lab.server.gate import Gate
from scaledot.lab.server.monitor import monitor
from scaledot.lab.server.packed import respond
from scaledot.lab.server.page import INDEX, PageFile
from scaledot.lab.server.plain_json import dumps
from scaledot.lab.server.start import with_start
from scaledot.lab.server.worker import Worker


def make_app(
    page: dict[str, PageFile], token: str, port: int, *, lang: str = "en", run: Path | None = None
) -> Gate:
    """run: the file of the run that the monitor shows."""
    app = Starlette(
        routes=[
            Route("/api/lessons", _lessons),
            Route("/api/catalogue/{lang}", _catalogue),
            Route("/api/flashcards/{lang}.txt", _anki),
            Route("/api/flashcards/{lang}", _flashcards),
            WebSocketRoute("/api/ask", ask),
            WebSocketRoute("/api/monitor", monitor),
            Route("/{path:path}", _file),
        ],
        lifespan=_lifespan,
        exception_handlers={HTTPException: _short_error},
    )
    app.state.page = {**page, INDEX: with_start(page[INDEX], lang, run=run is not None)}
    app.state.catalogues = {}
    app.state.lang = lang
    app.state.run = run
    app.state.worker = Worker()
    return Gate(app, token, port)


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    # In its first lesson torch sets up what it needs, 50 MB of it. Do that before somebody waits
    # for a lesson; where the page opens at a run, perhaps nobody asks for one.
    warming = None
    if app.state.run is None:
        first = next(iter(answers.LESSONS))
        warming = asyncio.create_task(app.state.worker.do(partial(answers.answer, first, {})))
    yield
    if warming is not None:
        warming.cancel()
    app.state.worker.close()


async def _file(request: Request) -> Response:
    path = request.path_params["path"]
    found = request.app.state.page.get(path or INDEX)
    if found is None:
        raise HTTPException(404, "there is no such file")
    return respond(request, found)


async def _lessons(request: Request) -> Response:
    state = request.app.state
    return _json(answers.listing(state.lang, state.run is not None))


async def _catalogue(request: Request) -> Response:
    lang = _language(request)
    known: dict[str, PageFile] = request.app.state.catalogues
    if lang not in known:
        known[lang] = PageFile(dumps(catalogue.load(lang)).encode(), "application/json")
    return respond(request, known[lang])


async def _flashcards(request: Request) -> Response:
    lang = _language(request)
    return _json(await request.app.state.worker.do(answers.cards, lang))


async def _anki(request: Request) -> Response:
    lang = _language(request)
    text = await request.app.state.worker.do(flashcards.anki, lang)
    name = f"scaledot-{lang}.txt"
    return PlainTextResponse(text, headers={"content-disposition": f"attachment; filename={name}"})


def _language(request: Request) -> str:
    lang = request.path_params["lang"]
    known = catalogue.languages()
    if lang not in known:
        raise HTTPException(404, f"there is no such language; there are {', '.join(known)}")
    return lang


def _json(value: object) -> Response:
    return Response(dumps(value), media_type="application/json")


async def _short_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code)
