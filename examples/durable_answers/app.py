"""The service: ``POST /answers`` streams an answer while it is written, and any time after that.

    uvicorn examples.durable_answers.app:app
    fencepost worker run examples.durable_answers.app:durable

Each paragraph is a step: one call of the model, which is not made again once it has ended. Its tokens go out live, each finished
sentence is stored. The page is ``index.html``; its reader of streams is the one that Fencepost ships.
"""

from pathlib import Path
from typing import Annotated, Final
from uuid import uuid4

from fastapi import Cookie, FastAPI, HTTPException
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, Field

import producer_sdk.http.client
from consumer_sdk import WorkflowContext
from examples.durable_answers.model import PARAGRAPHS, tokens
from producer_sdk.http import Durable, Principal, Retry

__all__ = ["app", "durable"]

_PAGE: Final = Path(__file__).with_name("index.html")
_READER: Final = Path(producer_sdk.http.client.__file__).with_name("durable.js")
_SENTENCE_ENDS: Final = (".", "!", "?")


class Question(BaseModel):
    prompt: str = Field(min_length=1, max_length=500)


class Answer(BaseModel):
    text: str


async def current_reader(reader: Annotated[str, Cookie()] = "") -> Principal:
    """Who asks: the page gives each browser a cookie. A real service looks at a session here."""
    if not reader:
        raise HTTPException(401)
    return Principal("answers", reader)


durable = Durable(principal=current_reader)
router = durable.router()


@durable.workflow("answer", retry=Retry(base_seconds=0.2, cap_seconds=5.0))
async def answer(context: WorkflowContext, question: Question) -> Answer:
    async def paragraph(prompt: str, number: int) -> str:
        """One call of the model."""
        text, sentence, place = "", "", 0
        async for token in tokens(prompt, number):
            context.emit({"paragraph": number, "place": place, "text": token})
            sentence, place = sentence + token, place + 1
            if token.rstrip().endswith(_SENTENCE_ENDS):
                await context.publish({"paragraph": number, "text": sentence})
                text, sentence, place = text + sentence, "", 0
        return text + sentence

    written = [await context.step("paragraph", paragraph, question.prompt, number) for number in range(len(PARAGRAPHS))]
    return Answer(text="".join(written))


@router.post("/answers")
@durable.stream(answer, live=True)
async def answers(question: Question) -> Question:
    """Ask a question, or go on with its stream: the same request, with the last id as Last-Event-ID."""
    return question


app = FastAPI(title="Answers")
app.include_router(router)


@app.get("/", include_in_schema=False)
async def page(reader: Annotated[str, Cookie()] = "") -> Response:
    response = FileResponse(_PAGE, headers={"Cache-Control": "no-store"})
    if not reader:
        response.set_cookie("reader", uuid4().hex, httponly=True, samesite="strict")
    return response


@app.get("/durable.js", include_in_schema=False)
async def stream_reader() -> Response:
    return FileResponse(_READER, media_type="text/javascript")


durable.install(app)
