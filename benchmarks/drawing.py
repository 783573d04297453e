"""Stand-alone SVG files of charts, with their own CSS for light and dark mode."""

from collections.abc import Sequence

from loadgen.svg import HEIGHT, WIDTH

STYLE = (
    "svg { font-family: system-ui, sans-serif; fill: #1f2328; } .title { font-weight: 600; } "
    ".grid { stroke: #8884; } .shade { fill: #8882; } line.mark { stroke: #c8321f; stroke-dasharray: 4 3; } "
    "text.mark { fill: #c8321f; } @media (prefers-color-scheme: dark) { svg { fill: #d5dbe1; } "
    "line.mark { stroke: #ff7b6b; } text.mark { fill: #ff7b6b; } }"
)


def document(*columns: Sequence[str], text: float = 11.0) -> str:
    """Return a stand-alone SVG file with charts in columns and the style that a page would provide.

    `text` is the height of the text where a chart is WIDTH wide.
    """
    size = f'width="{WIDTH:g}" height="{HEIGHT:g}"'
    body = "".join(
        one.replace("<svg ", f'<svg x="{across * WIDTH:g}" y="{down * HEIGHT:g}" {size} ', 1)
        for across, column in enumerate(columns)
        for down, one in enumerate(column)
    )
    box = f"0 0 {WIDTH * len(columns):g} {HEIGHT * max(map(len, columns)):g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="{text:g}"><style>{STYLE}</style>\n'
        f"{body}\n</svg>\n"
    )
