"""The `[power]` section: which backend sets caps, how fast, and by which curve it is planned."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.errors import PlanError
from runtime.power.curve import check_points

BackendName = Literal["auto", "emulated", "nvml", "nvml_read_only", "dry_run"]
CurvePoints = tuple[tuple[float, float], ...]


class PowerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Power of the racks. Watts, degrees Celsius, seconds.

    backend: "auto" is "emulated" on emulated devices and "nvml" on real ones; "nvml_read_only"
        never sets a cap, "dry_run" writes down what it would set.
    normal_cap_w: cap of real GPUs without boost; 0 takes what each enforces when the agent starts.
        A boost exists only where this is below the device's maximum.
    ramp_w_per_s: how fast one GPU's cap may rise above the normal one; lowering is never delayed.
    hot_c: temperature from which watts are taken back; 0 goes by the device's own throttling.
    feedback: trim boosts by measured step shares; without it the model's plan stands.
    reshare: when watts cannot hold the pace, share the batch out anew at a step boundary.
    curve: measured (power ratio, pace) points, as `counterpoise power calibrate` writes them; ()
        is the paper's fit. curve_file: a file that holds them, relative to the config.
    """

    backend: BackendName = "auto"
    normal_cap_w: float = 0.0
    ramp_w_per_s: float = 250.0
    hot_c: float = 0.0
    feedback: bool = True
    reshare: bool = True
    curve: CurvePoints = ()
    curve_file: str = ""

    def __post_init__(self) -> None:
        for key in ("normal_cap_w", "hot_c"):
            value = getattr(self, key)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"`{key}` is {value!r}; allowed: 0 or more")
        if not 0.0 < self.ramp_w_per_s < float("inf"):
            raise ValueError(f"`ramp_w_per_s` is {self.ramp_w_per_s!r}; allowed: more than 0")
        if self.curve and self.curve_file:
            raise ValueError("`curve` and `curve_file` are both given; leave one out")
        require_curve("curve", self.curve)


def require_curve(key: str, points: CurvePoints) -> None:
    """Refuse points that are no curve.

    Raises:
        ValueError: as a config's `__post_init__` should.
    """
    if points:
        try:
            check_points(points)
        except PlanError as error:
            raise ValueError(f"`{key}`: {error}") from error
