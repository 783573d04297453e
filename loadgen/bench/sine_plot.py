"""The plot of a co-location run: online arrivals per second, as scheduled, and offline tokens per second over time."""

from collections.abc import Callable, Sequence


def draw(
    delivered: Sequence[tuple[float, int]], rate: Callable[[float], float], seconds: float, bin_seconds: float = 2.0
) -> str:
    """Both curves over `seconds` as one SVG document; `delivered`: (time, tokens) of offline work."""
    width, height, left, bottom = 860, 320, 60, 40
    bins = int(seconds / bin_seconds)
    offline = [0.0] * bins
    for at, tokens in delivered:
        if at < bins * bin_seconds:
            offline[int(at / bin_seconds)] += tokens / bin_seconds
    top_offline = max(offline) * 1.1 or 1.0
    top_rate = max(rate(t) for t in range(int(seconds) + 1)) * 1.1

    def points(values: list[tuple[float, float]], top: float) -> str:
        scale = (width - 2 * left) / seconds
        return " ".join(
            f"{left + t * scale:.1f},{height - bottom - v / top * (height - 2 * bottom):.1f}" for t, v in values
        )

    harvest = points([((i + 0.5) * bin_seconds, v) for i, v in enumerate(offline)], top_offline)
    load = points([(float(t), rate(t)) for t in range(int(seconds) + 1)], top_rate)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="13">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<polyline points="{load}" fill="none" stroke="#d62728" stroke-width="2"/>',
            f'<polyline points="{harvest}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
            f'<text x="{left}" y="22" fill="#d62728">online requests/s (top {top_rate:.1f})</text>',
            f'<text x="{width - left}" y="22" text-anchor="end" fill="#1f77b4">offline tokens/s (top '
            f"{top_offline:.0f})</text>",
            f'<line x1="{left}" y1="{height - bottom}" x2="{width - left}" y2="{height - bottom}" stroke="#333"/>',
            f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">time, 0 to {seconds:.0f} s</text>',
            "</svg>",
            "",
        ]
    )
