"""Commands on checkpoints: list them, verify one, export one for other tools, import from them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import msgspec

from runtime.commands.common import ago, json_option, print_json, print_table
from runtime.engine.checkpoint import (
    MANIFEST,
    CheckpointError,
    checkpoints_by_age,
    read_full,
    read_manifest,
)
from runtime.engine.hugging_face import export_llama
from runtime.engine.llama_import import import_llama
from runtime.errors import UserError
from runtime.layout.units import num_parameters
from storage.settings import Settings

folder_argument = click.argument(
    "folder", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.group()
def checkpoint() -> None:
    """Look at, verify, export and import checkpoints."""


@checkpoint.command("list")
@json_option
def list_checkpoints(as_json: bool) -> None:
    """Every sealed checkpoint of this home, the newest first, then what was set aside."""
    rows: list[dict[str, object]] = []
    runs = Settings.from_env().home / "runs"
    aside = sorted(runs.glob("*/checkpoint/damaged-*"))
    for folder in [*checkpoints_by_age([*runs.glob("*/checkpoint/step-*")]), *aside]:
        row: dict[str, object] = {"folder": str(folder), "run": folder.parent.parent.name}
        try:
            manifest = read_manifest(folder)
            row |= {
                "step": manifest.applied_step,
                "num_bytes": sum(part.num_bytes for part in manifest.parts),
                "at": (folder / MANIFEST).stat().st_mtime,
                "error": "",
            }
            if folder in aside:
                raise CheckpointError(f"{folder} was set aside as damaged")
        except CheckpointError as error:
            row |= {"step": None, "num_bytes": 0, "at": 0.0, "error": str(error)}
        rows.append(row)
    if as_json:
        print_json(rows)
    elif not rows:
        click.echo("no checkpoint yet; a run writes one at its end, or see [checkpoint] every_s")
    else:
        print_table(
            ["run", ">step", ">MB", "written", "folder"],
            [
                [
                    str(row["run"]),
                    "damaged" if row["error"] else str(row["step"]),
                    f"{float(str(row['num_bytes'])) / 1e6:.1f}",
                    ago(float(str(row["at"])), time.time()) if row["at"] else "",
                    str(row["folder"]),
                ]
                for row in rows
            ],
        )


@checkpoint.command()
@folder_argument
@json_option
def verify(folder: Path, as_json: bool) -> None:
    """Read every part in FOLDER and compare its checksum; exit code 1 if it cannot be trusted."""
    try:
        manifest = read_manifest(folder, verify=True)
        found = {
            "step": manifest.applied_step,
            "next_sample": manifest.next_sample,
            "seed": manifest.train.seed,
            "ledger": manifest.ledger,
        }
        why = ""
    except CheckpointError as error:
        found, why = {"step": 0}, str(error)
    if as_json:
        print_json({"ok": not why, "error": why, **found})
    else:
        whole = "" if why else f"whole: step {found['step']}, {len(manifest.parts)} parts"
        click.echo(why or whole, err=bool(why))
    if why:
        sys.exit(1)


@checkpoint.command()
@folder_argument
@click.argument("target", type=click.Path(path_type=Path))
def export(folder: Path, target: Path) -> None:
    """Write the weights in FOLDER to TARGET as Hugging Face's Llama (safetensors, config.json)."""
    try:
        manifest = read_manifest(folder)
        step, full = read_full(folder, manifest.model)
        export_llama(target, manifest.model, full, manifest.train.seq_len)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    click.echo(f"step {step} written to {target}")


@checkpoint.command("import")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to make the checkpoint in.",
)
@click.option("--mlp-block", default=8, show_default=True, help="MLP columns a unit.")
@click.option("--vocab-block", default=8, show_default=True, help="Vocabulary rows a unit.")
@json_option
def import_weights(
    source: Path, target: Path, mlp_block: int, vocab_block: int, as_json: bool
) -> None:
    """Make the Hugging Face Llama in SOURCE (safetensors, config.json) a checkpoint at step 0.

    Prints the configuration of a run that trains from it.
    """
    try:
        manifest = import_llama(source, target, mlp_block=mlp_block, vocab_block=vocab_block)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    model = msgspec.to_builtins(manifest.model)
    if as_json:
        print_json({"folder": str(target), "model": model})
        return
    click.echo(f"{num_parameters(manifest.model):,} parameters written to {target}", err=True)
    click.echo("[model]")
    for key, value in model.items():
        click.echo(f"{key} = {json.dumps(value)}")
    click.echo(f"\n[checkpoint]\nstart = {json.dumps(str(target.resolve()))}")
