"""How a state looks: its colour, its mark and its word, the same in light and dark and on every
page.

Five colours that stay apart for colour-blind eyes; colour is never the only signal, so each state
has a mark. Knows no Streamlit; the components get these values as data.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.history.incidents import Part
from storage.records import Bucket, ProposalState, RunStatus

HEALTHY = "#2f8f86"
SUSPECT = "#cb9700"
DEGRADED = "#9b3fa8"
FAILED = "#c8321a"
BOOSTED = "#2563eb"
NEUTRAL = "#808a94"


@dataclass(frozen=True, kw_only=True)
class Look:
    """quiet: drawn as a tint with a border, so that what is not healthy stands out. hatch: idle,
    not lost.
    """

    mark: str
    colour: str
    word: str
    quiet: bool = False
    hatch: bool = False

    def data(self) -> dict[str, object]:
        return {
            "mark": self.mark,
            "colour": self.colour,
            "word": self.word,
            "quiet": self.quiet,
            "hatch": self.hatch,
        }


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if light > 0.18 else "#ffffff"


# Order matters: the position is the code in the fleet's packed blob. The first six follow
# GPU_STATES.
CELL_LOOKS: dict[str, Look] = {
    "healthy": Look(mark="·", colour=HEALTHY, word="healthy", quiet=True),
    "suspect": Look(mark="?", colour=SUSPECT, word="suspect"),
    "degraded": Look(mark="D", colour=DEGRADED, word="degraded"),
    "draining": Look(mark="↓", colour=DEGRADED, word="draining"),
    "failed": Look(mark="×", colour=FAILED, word="failed"),
    "repairing": Look(mark="R", colour=SUSPECT, word="repairing"),
    "boosted": Look(mark="▲", colour=BOOSTED, word="boosted"),
    "idle": Look(mark="–", colour=NEUTRAL, word="left out", hatch=True),
    "dead": Look(mark="○", colour=NEUTRAL, word="dead slot", hatch=True),
    "spare": Look(mark="S", colour=NEUTRAL, word="spare", quiet=True),
}
CELL_CODES: dict[str, int] = {name: index for index, name in enumerate(CELL_LOOKS)}

STATUS_LOOKS: dict[RunStatus, Look] = {
    "starting": Look(mark="…", colour=NEUTRAL, word="starting", quiet=True),
    "running": Look(mark="·", colour=HEALTHY, word="running", quiet=True),
    "reconfiguring": Look(mark="↻", colour=BOOSTED, word="reconfiguring"),
    "waiting": Look(mark="?", colour=SUSPECT, word="waiting for a GPU"),
    "paused": Look(mark="‖", colour=NEUTRAL, word="paused"),
    "stopped": Look(mark="■", colour=NEUTRAL, word="stopped"),
    "failed": Look(mark="×", colour=FAILED, word="failed"),
}
DEGRADED_RUN = Look(mark="D", colour=DEGRADED, word="running degraded")

PROPOSAL_LOOKS: dict[ProposalState, Look] = {
    "open": Look(mark="?", colour=SUSPECT, word="open: waits for a decision"),
    "approved": Look(mark="✓", colour=BOOSTED, word="approved"),
    "applying": Look(mark="↻", colour=BOOSTED, word="applying"),
    "applied": Look(mark="✓", colour=HEALTHY, word="applied, verified by the runtime"),
    "failed": Look(mark="×", colour=FAILED, word="failed"),
    "rejected": Look(mark="×", colour=NEUTRAL, word="rejected"),
    "expired": Look(mark="–", colour=NEUTRAL, word="expired"),
    "stale": Look(mark="–", colour=NEUTRAL, word="stale"),
}

SEVERITY_LOOKS: dict[str, Look] = {
    "info": Look(mark="i", colour=NEUTRAL, word="info", quiet=True),
    "warning": Look(mark="!", colour=SUSPECT, word="warning"),
    "critical": Look(mark="×", colour=FAILED, word="critical"),
}


@dataclass(frozen=True, kw_only=True)
class BucketLook:
    """A part of the goodput ribbon. means: what the time in it was."""

    word: str
    colour: str
    means: str
    hatch: bool = False


BUCKET_LOOKS: dict[Bucket, BucketLook] = {
    "productive": BucketLook(
        word="productive", colour=HEALTHY, means="steps committed at the pace of the healthy run"
    ),
    "degraded": BucketLook(
        word="degraded", colour=DEGRADED, means="what a reduced shape loses against the healthy run"
    ),
    "detecting": BucketLook(
        word="detecting", colour=SUSPECT, means="from the failure until it was known"
    ),
    "reconfiguring": BucketLook(
        word="reconfiguring", colour=BOOSTED, means="forming the next generation"
    ),
    "recomputing": BucketLook(
        word="recomputing", colour="#5f9be8", means="running dropped steps again"
    ),
    "checkpointing": BucketLook(
        word="checkpointing", colour="#8e8368", means="writing or reading checkpoints"
    ),
    "waiting_for_approval": BucketLook(
        word="waiting for approval", colour=FAILED, means="lost while a proposal was open"
    ),
    "paused": BucketLook(
        word="paused", colour="#5a626b", means="stopped by an operator, or no GPU was left"
    ),
    "starting": BucketLook(word="starting", colour="#9aa4ae", means="until the first step"),
    "unknown": BucketLook(
        word="unknown", colour=NEUTRAL, means="not accounted for by any other bucket", hatch=True
    ),
}


PART_LOOKS: dict[Part, BucketLook] = {
    "detected": BucketLook(
        word="detected", colour=SUSPECT, means="from the first evidence until it was known"
    ),
    "proposed": BucketLook(
        word="proposed", colour="#5f9be8", means="until the planner had a proposal"
    ),
    "waited": BucketLook(word="waited", colour=FAILED, means="the proposal waited for a decision"),
    "applied": BucketLook(
        word="applied", colour=BOOSTED, means="from the decision to the first committed step"
    ),
    "reduced": BucketLook(
        word="ran reduced", colour=DEGRADED, means="trained on without every slot"
    ),
}

MOMENT_LOOKS: dict[str, Look] = {
    "evidence": Look(mark="e", colour=NEUTRAL, word="evidence", quiet=True),
    "generation": Look(mark="g", colour=HEALTHY, word="generation", quiet=True),
    "proposal": Look(mark="?", colour=SUSPECT, word="proposal"),
    "decision": Look(mark="✓", colour=BOOSTED, word="decision"),
    "recovery": Look(mark="✓", colour=HEALTHY, word="recovery"),
}
WELL = Look(mark="✓", colour=HEALTHY, word="well", quiet=True)
