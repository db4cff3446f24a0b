"""The ACL file of an external Redis."""

from __future__ import annotations

import os

import click

from storage.live.acl import acl_file


@click.command()
def redis_acl() -> None:
    """Print an ACL file with one user per role for an external Redis or Valkey.

    Passwords are read from COUNTERPOISE_REDIS_<ROLE>_PASSWORD (VIEWER, APP, AGENT, RECORDER,
    NOTIFIER, CONTROLLER); only their hashes are printed. Each process then signs in to the Redis
    that COUNTERPOISE_REDIS_URL names (without a user) with its own; the command line as APP.
    """
    click.echo(acl_file(os.environ), nl=False)
