"""Values in a body that pydantic does not read: of the JSON type that they must have, or refused.

Every function raises `Rejected` (400), which names the place as the client wrote it (`path`).
"""

from collections.abc import Collection
from typing import Any

from httpd.errors import invalid, wrong_type
from httpd.text import shown


def object_of(value: Any, path: str) -> dict[str, Any]:
    """The value, an object."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def string_of(value: Any, path: str) -> str:
    """The value, a string."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return value


def required_string(holder: dict[str, Any], name: str, path: str) -> str:
    """The string at `name` of the object at `path`."""
    if holder.get(name) is None:
        raise invalid(
            f"Missing required parameter: '{path}.{name}'.",
            f"{path}.{name}",
            "missing_required_parameter",
        )
    return string_of(holder[name], f"{path}.{name}")


def required_role(message: dict[str, Any], path: str, roles: Collection[str]) -> str:
    """The message's role, one of `roles`."""
    role = required_string(message, "role", path)
    if role not in roles:
        raise invalid(
            f"Invalid value for '{path}.role': {shown(role)}. Supported values are: "
            f"{', '.join(roles)}.",
            f"{path}.role",
            "invalid_value",
        )
    return role
