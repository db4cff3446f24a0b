"""Reads of the SQL history."""


class Lookback:
    def __init__(self, url: str) -> None:
        self.url = url
