"""The protocol of task services as an OpenAPI 3.1 document, made from the messages themselves."""

import msgspec

from shoal.tasks.remote_protocol import PROTOCOL, Acknowledged, Hello, Results, Welcome, Work, WorkRequest
from shoal.types import Json

REFERENCES = "#/components/schemas/{name}"
MEMBER: Json = {"name": "member", "in": "path", "required": True, "schema": {"type": "string"}}


def document() -> Json:
    """The document that the task server gives at /openapi.json."""
    kinds = (Hello, Welcome, WorkRequest, Work, Results, Acknowledged)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCES)
    of = dict(zip(kinds, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal task services", "version": str(PROTOCOL)},
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": {
            "/v1/members": {"post": _operation("Register a process of a service", of[Hello], of[Welcome])},
            "/v1/members/{member}/work": {
                "parameters": [MEMBER],
                "post": _operation("Ask for work; the heartbeat", of[WorkRequest], of[Work]),
            },
            "/v1/members/{member}/results": {
                "parameters": [MEMBER],
                "post": _operation("Hand in results", of[Results], of[Acknowledged]),
            },
            "/v1/members/{member}": {
                "parameters": [MEMBER],
                "delete": {"summary": "Leave", "responses": {"204": {"description": "gone"}}},
            },
        },
    }


def _operation(summary: str, asked: Json, answered: Json) -> Json:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {
            "200": {"description": "done", "content": {"application/json": {"schema": answered}}},
            "400": {"description": "not what the schema says"},
            "401": {"description": "without the token"},
            "404": {"description": "not registered, or silent for too long: register again"},
            "409": {"description": "a service that is not wanted as it is"},
        },
    }
