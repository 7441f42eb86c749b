"""The text inside a Markdown code fence, in which agents often answer. Pure."""


def without_fence(text: str) -> str:
    """The content of a text that is one code fence and nothing else; any other text as it is, stripped."""
    text = text.strip()
    if not (text.startswith("```") and text.endswith("```") and len(text) > 6):
        return text
    # The first line may name a language.
    first, newline, rest = text[3:-3].partition("\n")
    return rest.strip() if newline else first.strip()
