"""What each role may do in an external Redis, as lines of its ACL file. Pure.

A decision counts by its signature, not by who could write it; this keeps the rest of the live state
out of the reach of credentials that leak from a lesser role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from storage.settings import SettingsError

MIN_PASSWORD_CHARS = 16

_READS = "+@read +@connection -@dangerous"
_WRITES = "+@read +@write +@connection +eval +evalsha +script|load +multi +exec -@dangerous"
_RULES = {
    "viewer": f"%R~cp:* {_READS}",
    "app": "%R~cp:* ~cp:run:*:submitted:* ~cp:run:*:commands ~cp:run:*:proposal:* " + _WRITES,
    "agent": f"%R~cp:* ~cp:run:*:racks ~cp:run:*:rack:* {_WRITES}",
    "recorder": f"%R~cp:* ~cp:run:*:journal ~cp:run:*:ack ~cp:journals {_WRITES}",
    "notifier": f"%R~cp:* ~cp:notifier {_WRITES}",
    "controller": f"~cp:* {_WRITES}",
}
ROLES = tuple(_RULES)


def password_variable(role: str) -> str:
    return f"COUNTERPOISE_REDIS_{role.upper()}_PASSWORD"


def acl_file(env: Mapping[str, str]) -> str:
    """The ACL file: one user per role with the hash of its password, and nobody else.

    Args:
        env: holds every role's password.

    Raises:
        SettingsError: names the variables that are missing or too short.
    """
    short = [
        password_variable(role)
        for role in ROLES
        if len(env.get(password_variable(role), "")) < MIN_PASSWORD_CHARS
    ]
    if short:
        raise SettingsError(
            f"{', '.join(short)}: not set or too short; "
            f"set each to {MIN_PASSWORD_CHARS} characters or more"
        )
    lines = ["user default off resetpass resetkeys resetchannels -@all"]
    for role, rules in _RULES.items():
        digest = hashlib.sha256(env[password_variable(role)].encode()).hexdigest()
        lines.append(f"user {role} on #{digest} resetchannels {rules}")
    return "\n".join(lines) + "\n"
