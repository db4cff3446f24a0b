"""A command that is not carried out. Pure."""

from __future__ import annotations


class Refused(Exception):
    """Not done; `code` as in CommandResult."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
