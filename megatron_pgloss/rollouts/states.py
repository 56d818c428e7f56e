"""Who wrote a token, and how a rollout ended."""

from __future__ import annotations

from enum import StrEnum


class Author(StrEnum):
    """Who wrote a token. The author decides which components a token is in; the role decides only weights."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    HARNESS = "harness"
    RENDERER = "renderer"
    VERIFIER = "verifier"
    COPIED = "copied"


class Termination(StrEnum):
    """How a rollout ended. EOS is just a policy token and no state of its own."""

    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    INVALID = "invalid"
    FAULT = "fault"
    """Infrastructure broke: the sequence leaves every component and never votes in a baseline."""
