"""What decoders raise for bytes that are not what they should be: damaged, of another program, nested without end."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""To be caught wherever a file that Paceline did not write a moment ago is decoded."""
