"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("paceline", deadline=None)  # wall time says nothing on a shared machine
settings.load_profile("paceline")
