"""`WS /v1/realtime`: sessions of events as OpenAI's clients send and read them."""

from __future__ import annotations

from starlette.websockets import WebSocket

from lookonce.errors import BadRequestError
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.headers import header
from lookonce.server.routes.realtime.connection import Outbox, RealtimeConnection
from lookonce.server.routes.realtime.events import SessionKind, SessionOptions
from lookonce.server.routes.realtime.session import RealtimeSession
from lookonce.server.routes.realtime.work import SessionTasks
from lookonce.server.services import Services

SUBPROTOCOL = "realtime"
INTENTS = ("conversation", "transcription")


async def realtime(websocket: WebSocket) -> None:
    """Raises what refuses the WebSocket, before it is accepted."""
    services: Services = websocket.app.state.services
    principal: Principal = websocket.scope["state"]["principal"]
    model = services.require_base_model(websocket.query_params.get("model"))
    services.require_ready()
    outbox = Outbox()
    with services.realtime.opened(principal.tenant) as budget:
        copies = services.realtime.copies(principal.tenant)
        work = SessionTasks(services, principal, model, outbox.room, copies)
        session = RealtimeSession(
            kind=_kind(
                websocket,
                speech_only=services.renderer.speech is not None
                or services.renderer.transcribes_live,
            ),
            model=model,
            hears="audio" in services.renderer.modalities,
            hears_live=services.renderer.transcribes_live,
            budget=budget,
            max_audio_seconds=min(
                services.config.media.max_audio_seconds, services.renderer.max_audio_seconds
            ),
            send=outbox.put,
            work=work,
            options=SessionOptions(
                reuse_receipt=header(websocket.scope, b"x-reuse-receipt") == "1"
            ),
        )
        work.session = session
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in _offered(websocket) else None)
        await RealtimeConnection(
            websocket,
            session,
            work,
            outbox,
            detectors=services.realtime.detectors,
            drain=services.drain,
            idle_timeout=services.realtime.config.idle_timeout,
            wait_refused=lambda: services.keys.wait_refused(principal),
        ).run()


def _offered(websocket: WebSocket) -> list[str]:
    subprotocols: list[str] = websocket.scope.get("subprotocols", [])
    return subprotocols


def _kind(websocket: WebSocket, *, speech_only: bool) -> SessionKind:
    """`speech_only`: the model transcribes and does nothing else. Raises `BadRequestError`."""
    default = "transcription" if speech_only else "conversation"
    intent = websocket.query_params.get("intent", default)
    if intent not in INTENTS:
        raise BadRequestError(
            f"intent: {intent[:60]!r} is none of {', '.join(INTENTS)}", param="intent"
        )
    if "call_id" in websocket.query_params:
        raise BadRequestError("call_id is not supported", param="call_id")
    return "transcription" if intent == "transcription" else "realtime"
