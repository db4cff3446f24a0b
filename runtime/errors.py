"""The one tree of errors of the runtime.

A `UserError` is a person's mistake: its message names the value, the allowed range and the fix,
and the command line prints it without a traceback.
"""


class CounterpoiseError(Exception):
    """Root of every error this project raises on purpose."""


class UserError(CounterpoiseError):
    """A person's mistake in a config, an argument or a command."""


class ConfigError(UserError):
    """A config that cannot be used; says which key, which value, what is allowed."""


class PlanError(CounterpoiseError):
    """A shape or plan that cannot be built (no live slot, a unit that nobody holds)."""


class GenerationAborted(CounterpoiseError):
    """The current generation ended under us; leave every collective and report."""


class DigestMismatch(CounterpoiseError):
    """Ranks disagree on the plan or the committed step; going on would corrupt the run."""
