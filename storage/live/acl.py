"""What each role may do in an external Redis, as lines of its ACL file. Pure.

A decision counts by its signature, not by who could write it; this keeps the rest of the live state
out of the reach of credentials that leak from a lesser role.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from storage.settings import Settings, SettingsError

MIN_PASSWORD_CHARS = 16

_READS = "%R~cp:* +@read +@connection -@dangerous"
_SCRIPTS = "+eval +evalsha +script|load"
# Beyond reading, each may write what its scripts write, and by no other command: none can remove
# what another has written.
_RULES = {
    "viewer": _READS,
    "app": f"{_READS} {_SCRIPTS} +xadd +hset +set +expire ~cp:run:*:submitted:* "
    "~cp:run:*:commands ~cp:run:*:proposal:* ~cp:notes ~cp:noted:*",
    "agent": f"{_READS} {_SCRIPTS} +xadd +hset ~cp:run:*:racks ~cp:run:*:rack:*",
    "recorder": f"{_READS} {_SCRIPTS} +set +xtrim ~cp:run:*:journal ~cp:run:*:ack ~cp:notes",
    "notifier": f"{_READS} +set ~cp:notifier",
    "controller": f"~cp:* +@read +@write +@connection {_SCRIPTS} -@dangerous",
}
ROLES = tuple(_RULES)


def password_variable(role: str) -> str:
    return f"COUNTERPOISE_REDIS_{role.upper()}_PASSWORD"


def as_role(settings: Settings, *roles: str, env: Mapping[str, str] | None = None) -> Settings:
    """`settings` with user and password of the first of these roles whose password the environment
    has, in the address of an external Redis; else as they are.

    Raises:
        SettingsError: the address names another user already.
    """
    env = os.environ if env is None else env
    role = next((one for one in roles if env.get(password_variable(one))), "")
    if not role or not settings.external_redis:
        return settings
    password = env[password_variable(role)]
    parts = urlsplit(settings.redis_url)
    userinfo, _, host = parts.netloc.rpartition("@")
    if userinfo:
        raise SettingsError(
            f"COUNTERPOISE_REDIS_URL names a user, and {password_variable(role)} is set too; "
            "leave one of them out"
        )
    netloc = f"{role}:{quote(password, safe='')}@{host}"
    # urlunsplit knows no authority for unix
    url = f"{parts.scheme}://{netloc}{parts.path}{'?' + parts.query if parts.query else ''}"
    return dataclasses.replace(settings, redis_url=url)


def without_others(env: Mapping[str, str], role: str) -> dict[str, str]:
    """`env` without the passwords of the other roles that may write."""
    others = {password_variable(one) for one in ROLES if one not in (role, "viewer")}
    return {name: value for name, value in env.items() if name not in others}


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
