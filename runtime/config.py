"""The run's configuration: one TOML file becomes one frozen `Config`.

Each section is owned by the component that reads it and checks itself in `__post_init__`; unknown
keys, wrong types and impossible values are refused before anything is started. Secrets never live
here.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from runtime.config_errors import explain, require
from runtime.errors import ConfigError
from runtime.health.config import HealthConfig
from runtime.plan.policy_config import PolicyConfig as PolicyConfig  # noqa: PLC0414 - a section
from runtime.power.config import CurvePoints, PowerConfig, require_curve


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decoder LM in the style of Llama: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    num_layers: int = 4
    hidden: int = 128
    num_query_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 8
    mlp_hidden: int = 344
    mlp_block: int = 8
    vocab: int = 256
    vocab_block: int = 8
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for key in [
            "num_layers",
            "hidden",
            "num_query_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_hidden",
            "mlp_block",
            "vocab",
            "vocab_block",
        ]:
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        require(
            self.num_query_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_query_heads ({self.num_query_heads})",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (RoPE pairs)")
        require(
            self.mlp_hidden % self.mlp_block == 0,
            "mlp_hidden",
            self.mlp_hidden,
            f"a multiple of mlp_block ({self.mlp_block})",
        )


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Data, batch and optimizer. `steps` 0 means until stopped.

    decay_tokens: after so many tokens of training the learning rate has come down from `lr` to
        `min_lr` along a cosine; 0 keeps it at `lr`.
    fractional: whether the units that a reduced replica cannot share out evenly are split by sample
        between its slots; "auto" where that is predicted to make steps shorter.
    no_decay: what `weight_decay` leaves alone; a tied head is the embedding.
    precision: of products; parameters, moments, residual stream and every sum over ranks are fp32.
    dropout: share of attention's and MLP's inner values that is dropped, per unit and sample.
    activation_checkpointing: keep only the residual stream and compute the rest again in backward.
    non_finite: a step whose loss or gradient is not finite, twice, is applied nowhere; "skip" goes
        on after its samples, unless more than `max_skipped` in a row are so; "stop" ends the run.
    """

    text: str = ""
    seq_len: int = 64
    global_batch: int = 16
    micro_batch: int = 16
    steps: int = 0
    lr: float = 3e-3
    warmup_steps: int = 20
    decay_tokens: int = 0
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[Literal["norms", "embedding", "head"], ...] = ("norms",)
    clip_norm: float = 1.0
    seed: int = 0
    sync: Literal["direct", "reshard"] = "direct"
    fractional: Literal["auto", "on", "off"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    dropout: float = 0.0
    activation_checkpointing: bool = False
    bucket_mb: float = 4.0
    state_hash_every: int = 50
    non_finite: Literal["skip", "stop"] = "skip"
    max_skipped: int = 3

    def __post_init__(self) -> None:
        for key in ("seq_len", "global_batch", "micro_batch"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        for key in (
            "steps", "warmup_steps", "decay_tokens", "seed", "state_hash_every", "max_skipped"
        ):  # fmt: skip
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        for key in ("lr", "clip_norm", "bucket_mb", "eps"):
            require(0 < getattr(self, key) < math.inf, key, getattr(self, key), "more than 0")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "0 or more, below 1")
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"0 to lr ({self.lr})")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "0 or more")
        require(
            all(0 <= beta < 1 for beta in self.betas),
            "betas",
            self.betas,
            "both 0 or more, below 1",
        )


class RackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scale-up domain; each rack carries one replica of `gpus` slots.

    spares: more GPUs of it, with running workers, that wait to take a dead slot's place.
    host: which agent owns its GPUs. power_budget_w: 0 means just enough for the normal cap of every
        slot and the lowest of every spare.
    """

    name: str
    gpus: int = 8
    spares: int = 0
    host: str = "localhost"
    power_budget_w: float = 0.0

    def __post_init__(self) -> None:
        require(1 <= self.gpus <= 72, "gpus", self.gpus, "1 to 72")
        require(0 <= self.spares <= 8, "spares", self.spares, "0 to 8")
        require(
            bool(self.name) and "/" not in self.name and self.name.isprintable(),
            "name",
            self.name,
            "a printable name without '/'",
        )

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of its GPUs by place: those that fill the slots at the start, then the spares."""
        return tuple(f"{self.name}/{place}" for place in range(self.gpus + self.spares))

    @property
    def seats(self) -> tuple[str, ...]:
        """The GPU of every slot at the start of a run."""
        return self.ids[: self.gpus]

    def full_budget_w(self, normal_w: float, min_w: float) -> float:
        """Watts for the normal cap of every slot and the lowest of every spare."""
        return self.gpus * normal_w + self.spares * min_w


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Racks and the devices in them. Device and backend are configuration, no fork in the code.

    gpu_memory_gb: of one GPU (10**9 bytes); what does not fit is refused and never proposed. 0: not
        known, and nothing is.
    """

    racks: tuple[RackConfig, ...] = (RackConfig(name="rack-0"), RackConfig(name="rack-1"))
    device: Literal["emulated", "cuda"] = "emulated"
    backend: Literal["gloo", "nccl"] = "gloo"
    gpu_memory_gb: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.racks) >= 1, "racks", list(self.racks), "at least one rack")
        require(
            0 <= self.gpu_memory_gb < math.inf,
            "gpu_memory_gb",
            self.gpu_memory_gb,
            "0 (not known) or more",
        )
        names = [rack.name for rack in self.racks]
        require(len(set(names)) == len(names), "racks", names, "distinct names")
        require(
            not (self.device == "emulated" and self.backend == "nccl"),
            "backend",
            self.backend,
            '"gloo" with device = "emulated"',
        )


class EmulatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The emulated device (labelled `emulated` wherever it is shown).

    step_s: what a healthy step takes at the normal cap. Power in watts, temperature in Celsius.
    curve: what the devices really do, as (power ratio, pace) points; () is the paper's fit. The
    planner does not know it: that is `power.curve`.
    """

    step_s: float = 1.0
    normal_cap_w: float = 1000.0
    min_cap_w: float = 200.0
    max_cap_w: float = 1300.0
    idle_w: float = 140.0
    ambient_c: float = 28.0
    thermal_resistance_c_per_w: float = 0.037
    thermal_tau_s: float = 20.0
    throttle_c: float = 85.0
    curve: CurvePoints = ()

    def __post_init__(self) -> None:
        require_curve("curve", self.curve)
        require(self.step_s >= 0, "step_s", self.step_s, "0 (as fast as the host) or more")
        require(
            0 < self.min_cap_w <= self.normal_cap_w <= self.max_cap_w,
            "normal_cap_w",
            self.normal_cap_w,
            f"min_cap_w ({self.min_cap_w}) to max_cap_w ({self.max_cap_w})",
        )


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses and deadlines of the control plane.

    Nothing listens beyond 127.0.0.1 unless told to.
    """

    host: str = "127.0.0.1"
    port: int = 0
    step_deadline_s: float = 10.0
    join_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "0 (any free port) to 65535")
        require(self.step_deadline_s > 0, "step_deadline_s", self.step_deadline_s, "more than 0")
        require(self.join_deadline_s > 0, "join_deadline_s", self.join_deadline_s, "more than 0")


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When checkpoints are written while a run trains, beside the one at its end.

    every_steps: at multiples of so many steps. every_s: so many seconds after the last one began;
    0 switches either off. keep: how many are kept; older ones go once a newer one is sealed.
    write_deadline_s: by when all parts must be on disk; else that checkpoint is given up.
    start: folder of a checkpoint to begin with instead of random weights; a run that goes on from a
        checkpoint of its own does so only if that one began there too.
    """

    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 2
    write_deadline_s: float = 120.0
    start: str = ""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, "every_steps", self.every_steps, "0 (off) or more")
        require(0 <= self.every_s < math.inf, "every_s", self.every_s, "0 (off) or more")
        require(self.keep >= 1, "keep", self.keep, "1 or more")
        require(
            0 < self.write_deadline_s < math.inf,
            "write_deadline_s",
            self.write_deadline_s,
            "more than 0",
        )


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole resolved configuration; stored with the run."""

    name: str = "demo"
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    emulated: EmulatedConfig = EmulatedConfig()
    policy: PolicyConfig = PolicyConfig()
    power: PowerConfig = PowerConfig()
    control: ControlConfig = ControlConfig()
    health: HealthConfig = HealthConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        require(bool(self.name) and self.name.isprintable(), "name", self.name, "a printable name")
        emulated = self.cluster.device == "emulated"
        fitting = (
            ("auto", "emulated", "dry_run")
            if emulated
            else ("auto", "nvml", "nvml_read_only", "dry_run")
        )
        require(
            self.power.backend in fitting,
            "power.backend",
            self.power.backend,
            f'one of {fitting} with cluster.device = "{self.cluster.device}"',
        )
        holdable = min(self.model.num_query_heads, self.model.mlp_hidden // self.model.mlp_block)
        for rack in self.cluster.racks:
            require(
                rack.gpus <= holdable,
                f"cluster.racks.{rack.name}.gpus",
                rack.gpus,
                f"1 to {holdable}, so that every slot holds a query head and an MLP block",
            )
            least_w = len(rack.ids) * self.emulated.min_cap_w
            require(
                not emulated or rack.power_budget_w == 0 or rack.power_budget_w >= least_w,
                f"cluster.racks.{rack.name}.power_budget_w",
                rack.power_budget_w,
                f"0 (enough for every normal cap) or {least_w:g} and more, the least its GPUs take",
            )
        self._check_pins()

    def _check_pins(self) -> None:
        """Whatever health pins must be there: a typing error would leave a GPU without its news."""
        ids = {gpu for rack in self.cluster.racks for gpu in rack.ids}
        ranges = ", ".join(f"{rack.ids[0]} to {rack.ids[-1]}" for rack in self.cluster.racks)
        for name, gpu in self.health.gpus.items():
            require(gpu in ids, f"health.gpus.{name}", gpu, ranges)
        names = [rack.name for rack in self.cluster.racks]
        for address, rack in self.health.switches.items():
            require(rack in names, f"health.switches.{address}", rack, ", ".join(names))


def load_config(path: Path | None) -> Config:
    """Read a TOML file (or the defaults when `path` is None).

    Raises:
        ConfigError: names the key, the value and the allowed range.
    """
    if path is None:
        return Config()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return _with_curve(parse_config(data, origin=str(path)), path.parent)


def _with_curve(config: Config, folder: Path) -> Config:
    """The config with the curve file's points in it, so that a run's record needs no other file."""
    if not config.power.curve_file:
        return config
    path = folder / config.power.curve_file
    try:
        points = tomllib.loads(path.read_text(encoding="utf-8")).get("curve")
        power = msgspec.convert(
            {**msgspec.structs.asdict(config.power), "curve": points, "curve_file": ""}, PowerConfig
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"power.curve_file {path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"power.curve_file {path}: {error}; `counterpoise power calibrate` writes one"
        ) from error
    return msgspec.structs.replace(config, power=power)


def parse_config(data: dict[str, object], *, origin: str) -> Config:
    """Turn decoded TOML into a `Config`; same errors as `load_config`."""
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {explain(error, data, Config)}") from error
