"""How a proposal lies in a hash: its body opaque, the fields that a script changes beside it. Pure.

Lua must not re-encode a proposal: cjson turns empty arrays into objects and cuts floats. So the
body is written once per `put_proposal`, and what a decision changes is merged over it on reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from storage.records import Proposal, ProposalState, RecordError, decode_packed, encode_packed


def to_fields(proposal: Proposal) -> dict[str, bytes | str]:
    """Hash fields of a proposal. feasible: one character per option, "1" when it may be chosen.
    left: approvals that are missing. out: a line for everyone who cannot add one. news: what is
    new since others looked."""
    return {
        "body": encode_packed(proposal),
        "state": proposal.state,
        "state_reason": proposal.state_reason,
        "revision": str(proposal.revision),
        "generation": str(proposal.generation),
        "expires_at": repr(float(proposal.expires_at)),
        "decided_by": proposal.decided_by,
        "decided_at": "" if proposal.decided_at is None else repr(float(proposal.decided_at)),
        "chosen": "" if proposal.chosen is None else str(proposal.chosen),
        "recommended": str(proposal.recommended),
        "left": str(proposal.approvals_left),
        "barred": proposal.barred,
        "news": proposal.progress if proposal.approvals else "",
        "out": "\n".join(["", *proposal.cannot_approve, ""]),
        "feasible": "".join("1" if option.feasible else "0" for option in proposal.options),
    }


def from_fields(fields: Mapping[bytes, bytes]) -> Proposal:
    """The proposal, with the changed fields merged over its body.

    Raises:
        RecordError: the body or a field does not decode.
    """
    try:
        body = fields[b"body"]
        text = {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}
        changes: dict[str, Any] = {
            "state": text["state"],
            "state_reason": text["state_reason"],
            "revision": int(text["revision"]),
            "decided_by": text["decided_by"],
            "decided_at": float(text["decided_at"]) if text["decided_at"] else None,
            "chosen": int(text["chosen"]) if text["chosen"] else None,
        }
    except (KeyError, ValueError) as error:
        raise RecordError(f"bad proposal: {error!r}") from error
    proposal: Proposal = decode_packed(body, Proposal)
    if changes["revision"] == proposal.revision:
        return proposal
    if changes["state"] not in get_args(ProposalState):
        raise RecordError(f"bad proposal: unknown state {changes['state']!r}")
    return msgspec.structs.replace(proposal, **changes)
