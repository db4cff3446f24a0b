"""Who asked: the signed identity that travels with a command, and what each role may ask for.

Whoever takes a command from a person signs it with its writer's key; the runtime checks it again.
Keys come from the environment, else from files of mode 0600 in the home folder.
This module must not know any backend.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from storage.audit_records import SignedIn
from storage.commands import Command
from storage.records import decode_packed, encode_packed
from storage.settings import SettingsError, make_private_folder

Role = Literal["viewer", "operator", "approver", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "approver", "admin")
Writer = Literal["app", "cli"]
WRITERS: tuple[Writer, ...] = ("app", "cli")
AskedT = TypeVar("AskedT", bound=Command | SignedIn)
MIN_KEY_BYTES = 16
MAX_AGE_S = 600.0
MAX_AHEAD_S = 60.0

_WRITER_OF = {"browser": "app", "cli": "cli"}
_LEAST_ROLE: dict[str, Role] = {
    "Trigger": "operator",
    "Report": "operator",
    "Fault": "operator",
    "Decide": "approver",
    "Pause": "approver",
    "Resume": "approver",
    "SetBudget": "admin",
    "Stop": "admin",
}


def writer_key(home: Path, writer: Writer, env: Mapping[str, str] | None = None) -> bytes:
    """The key `writer` signs with: of the environment, else of the home, made at first use.

    Raises:
        SettingsError: the key is too short, or its file is readable by others.
    """
    env = os.environ if env is None else env
    variable = f"COUNTERPOISE_{writer.upper()}_KEY"
    if value := env.get(variable, "").strip():
        if len(value.encode()) < MIN_KEY_BYTES:
            raise SettingsError(f"{variable} is too short; allowed: {MIN_KEY_BYTES} bytes or more")
        return value.encode()
    folder = home / "keys"
    make_private_folder(folder)
    path = folder / f"{writer}.key"
    if not path.exists():
        _make_key(path)
    if path.stat().st_mode & 0o077:
        raise SettingsError(f"{path} is readable by others; fix: chmod 600 {path}")
    return path.read_bytes()


def _make_key(path: Path) -> None:
    """Written aside and linked: of two that start at once one wins, and nobody reads half a key."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        aside.unlink()


def least_role(kind: type[Command]) -> Role:
    """The least role that may ask for commands of `kind`."""
    return _LEAST_ROLE.get(kind.__name__, "admin")


def may(role: str, kind: type[Command]) -> bool:
    """Whether somebody of `role` may ask for commands of `kind`."""
    return role in ROLES and ROLES.index(role) >= ROLES.index(least_role(kind))


def sign(command: AskedT, run: str, role: Role | Literal[""], key: bytes) -> AskedT:
    """`command` with its role and the signature over all of it and the run it is meant for."""
    named = msgspec.structs.replace(command, role=role, signature="")
    return msgspec.structs.replace(named, signature=_signature(named, run, key))


def not_genuine(asked: Command | SignedIn, run: str, keys: Mapping[Writer, bytes]) -> str:
    """Why `asked` may not be what its writer signed for `run`, "" when it is."""
    if not asked.signature:
        return "the command is not signed"
    writer = _WRITER_OF.get(asked.via)
    key = next((key for name, key in keys.items() if name == writer), None)
    if key is None:
        return f"no writer of commands is known by the way {asked.via!r}"
    unsigned = msgspec.structs.replace(asked, signature="")
    expected = _signature(unsigned, run, key).encode()
    if not hmac.compare_digest(expected, asked.signature.encode()):
        return "the signature does not match: forged, altered or meant for another run"
    return ""


def refusal(command: Command, run: str, keys: Mapping[Writer, bytes], now: float) -> str:
    """Why `command` must not be carried out, "" when it may be.

    Args:
        run: the run that received it.
        keys: the key of every writer.
        now: epoch seconds.
    """
    if why := not_genuine(command, run, keys):
        return why
    if not -MAX_AHEAD_S <= now - command.at <= MAX_AGE_S:
        return f"signed {now - command.at:.0f} s ago; allowed: up to {MAX_AGE_S:.0f} s. Send again"
    if not may(command.role, type(command)):
        return (
            f"role {command.role or 'none'} may not do this; "
            f"it takes {least_role(type(command))} or higher"
        )
    return ""


def _signature(command: Command | SignedIn, run: str, key: bytes) -> str:
    # The length keeps (run, command) apart: no other pair has the same bytes.
    name = run.encode()
    # Through the wire and back first: 5 in a float field arrives as 5.0, which has other bytes.
    canonical = encode_packed(decode_packed(encode_packed(command), type(command)))
    message = len(name).to_bytes(4, "big") + name + canonical
    return hmac.new(key, message, hashlib.sha256).hexdigest()
