"""What every page of the trainer must keep: nothing runs or loads but what the page itself says, whatever its texts are."""

from __future__ import annotations

import base64
import hashlib
import html.parser

# Ends a script, begins another, and a picture that fails; __PAGE_CSS__ looks like a mark of a template.
EVIL = "</script><script>window.alerted=1</script><img src=x onerror=window.alerted=1><b>x</b>\u2028__PAGE_CSS__"


class _Parsed(html.parser.HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inside and dict(attrs).get("type") != "application/json":
            self.inside[tag].append("")

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if self.cdata_elem in self.inside and attributes.get("type") != "application/json":
            self.inside[tag][-1] += data


def policy_of(page: str) -> dict[str, list[str]]:
    """The page's Content-Security-Policy: {directive: sources}."""
    (text,) = (
        attributes["content"] or ""
        for tag, attributes in _Parsed(page).tags
        if tag == "meta" and (attributes.get("http-equiv") or "").lower() == "content-security-policy"
    )
    return {name: sources for name, *sources in (directive.split() for directive in text.split(";"))}


def hash_of(text: str) -> str:
    """The source of a policy that lets this inline text act."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def assert_harmless(page: str, *, scripts: int, asks_server: bool = False) -> None:
    """Asserts that a page has so many scripts, that they and its style sheets alone act, and that it loads nothing."""
    parsed, policy = _Parsed(page), policy_of(page)
    assert len(parsed.inside["script"]) == scripts
    for tag in ("script", "style"):
        expected = [hash_of(text) for text in parsed.inside[tag]]
        assert policy[f"{tag}-src"] == (expected or ["'none'"])
    assert policy["connect-src"] == (["'self'"] if asks_server else ["'none'"])
    assert [policy[name] for name in ("default-src", "base-uri", "form-action")] == [["'none'"]] * 3
    assert policy["img-src"] == ["data:"]
    order = [tag for tag, _ in parsed.tags]
    assert order.index("meta") < min(order.index(tag) for tag in ("script", "style") if tag in order)
    for tag, attributes in parsed.tags:
        assert tag not in ("base", "embed", "form", "iframe", "img", "object"), tag
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert not (attributes.get("href") or "").lower().startswith("javascript:")
        assert "src" not in attributes
