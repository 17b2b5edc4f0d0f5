"""What the tests of this folder share."""

import re


def saying(*words: str) -> str:
    """A pattern for `pytest.raises(match=...)`: the message holds all these words, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)
