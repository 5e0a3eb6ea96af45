"""The Starlette app: routes, and the layers around them.

From the outside in: Starlette's own catch-all, CORS where it is switched on, `Edge` (request id,
500 bodies), `BodyLimit`, `HeadLimits`, `KeyGuard`, `RequestTimeout` where there is one, Starlette's
exception handlers, the router. Routing and every decision go by `scope["path"]`; the Host header
decides nothing.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from httpd import anthropic, chat_choice, completions, responses
from httpd.admin import Control, admin_routes
from httpd.anthropic_answer import MessageAnswer
from httpd.auth import KeyGuard
from httpd.body import BodyLimit
from httpd.chat import parse_chat
from httpd.choices import ChoiceKind
from httpd.deadline import RequestTimeout
from httpd.edge import Edge
from httpd.endpoint import Api, Endpoint
from httpd.errors import MESSAGES_PATH, on_http_exception, on_rejected
from httpd.head_limits import HeadLimits
from httpd.insight import Insight, insight_routes
from httpd.openapi import OpenApi
from httpd.page.document import page_route
from httpd.responses_answer import ResponseAnswer
from httpd.running import Running
from httpd.service import Rejected, Service
from httpd.settings import HttpSettings
from httpd.status import status_routes
from httpd.tokens import token_routes
from httpd.traces import Traces

CHAT = Api(
    chat_choice.ID_PREFIX,
    parse_chat,
    ChoiceKind(chat_choice.OBJECT, chat_choice.CHUNK_OBJECT, chat_choice.ChatChoice).answer,
)
COMPLETIONS = Api(
    completions.ID_PREFIX,
    completions.parse_completion,
    ChoiceKind(completions.OBJECT, completions.OBJECT, completions.CompletionChoice).answer,
)
MESSAGES = Api(anthropic.ID_PREFIX, anthropic.parse_message, MessageAnswer)
RESPONSES = Api(responses.ID_PREFIX, responses.parse_response, ResponseAnswer, responses.RENAMED)
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    MESSAGES_PATH: MESSAGES,
}


def create_app(
    service: Service,
    settings: HttpSettings,
    control: Control | None = None,
    insight: Insight | None = None,
    traces: Traces | None = None,
) -> Starlette:
    """The ASGI app that answers for `service`; it may be served before the service is READY.

    control  what admin routes act on; without it there are none
    insight  what /capacity, /live, /metrics and /debug tell; without it there are none
    traces   where requests leave theirs
    """
    running = Running() if control is None else control.running
    admin = []
    if control is not None:
        admin = admin_routes(control, settings.access, settings.body_timeout_s)
    openapi = OpenApi(service, settings.version)
    routes = [
        *(
            Route(path, Endpoint(api, service, settings, running), methods=["POST"])
            for path, api in APIS.items()
        ),
        *token_routes(service, settings),
        *status_routes(service, settings.version),
        *([] if insight is None else insight_routes(insight)),
        *admin,
        openapi.route(),
    ]
    openapi.describe(routes)
    page = [page_route()] if settings.has_page else []  # for people: not in the document
    app = Starlette(
        routes=[*routes, *page],
        middleware=_middleware(settings, traces or Traces()),
        exception_handlers={HTTPException: on_http_exception, Rejected: on_rejected},
    )
    app.router.redirect_slashes = False  # a redirect would repeat the client's Host header
    return app


def _middleware(settings: HttpSettings, traces: Traces) -> list[Middleware]:
    layers = [
        Middleware(Edge, traces=traces),
        Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        Middleware(HeadLimits),
        Middleware(KeyGuard, access=settings.access),
    ]
    if settings.request_timeout_s is not None:
        layers.append(Middleware(RequestTimeout, timeout_s=settings.request_timeout_s))
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        )
        layers.insert(0, cors)  # outside of the keys: a browser asks before it sends one
    return layers
